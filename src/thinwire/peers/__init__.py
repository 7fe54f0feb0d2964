"""Other ways to train over thin wires, to compare with: one small file each, behind the contract in `contract.py`."""
