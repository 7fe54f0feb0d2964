"""SparseLoCo (Sarfi, Therien, Lidin and Belilovsky 2025): DiLoCo whose changes travel as a few elements of 2 bits."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.peers.blocks import Blocks
from thinwire.peers.contract import Flat, Message, Wire, count_step, gather, mean_of
from thinwire.wire.bitpack import bits_to_ints, ints_to_bits, pack_bits, unpack_bits


class SparseLoCo:
    """After ``local_steps`` steps of ``optimizer`` a replica adds its change to an error that fades by ``error_decay``,
    sends the ``topk`` largest of each ``chunk`` elements of it, and keeps the rest. The outer step subtracts ``outer_lr``
    times the mean of what was sent: the fading error stands in for DiLoCo's outer momentum.

    An element travels as an index, a sign, and whether it is one of the larger of its chunk or of the smaller; a chunk's
    larger and smaller sizes are bfloat16.
    """

    has_own_parameters = True

    def __init__(
        self,
        flat: Flat,
        optimizer: Optimizer,
        *,
        local_steps: int,
        topk: int,
        chunk: int,
        outer_lr: float,
        error_decay: float = 0.95,
    ) -> None:
        self.optimizers = [optimizer]
        self.state = {"start": flat.values(), "error": flat.zeros()}
        self._flat, self._local_steps, self._topk = flat, local_steps, min(topk, chunk)
        self._outer_lr, self._error_decay = outer_lr, error_decay
        self._blocks, self._index_bits = Blocks(flat.sizes, chunk), max(1, (chunk - 1).bit_length())

    def compress(self, gradient_N: Tensor) -> Message:
        """Step; when it is time, of each chunk the packed indices, signs and halves, and two sizes."""
        self._flat.set_gradient(gradient_N)
        self.optimizers[0].step()
        if (count_step(self.state) + 1) % self._local_steps:
            return ()
        error_N = self.state["error"].mul_(self._error_decay).add_(self.state["start"] - self._flat.values())
        blocks_CE = self._blocks.cut(error_N)
        indices_CK = blocks_CE.abs().topk(self._topk, dim=1, sorted=False).indices
        message = self._encode(indices_CK, blocks_CE.gather(1, indices_CK))
        error_N -= self._blocks.join(self._decode(*message))
        return message

    def _encode(self, indices_CK: Tensor, values_CK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes_CK = values_CK.abs()
        is_large_CK = sizes_CK >= sizes_CK.mean(dim=1, keepdim=True)
        halves = [_mean_where(sizes_CK, half) for half in (~is_large_CK, is_large_CK)]
        bits = torch.cat([values_CK < 0, is_large_CK], dim=1).to(torch.uint8)
        packed_indices = pack_bits(ints_to_bits(indices_CK, self._index_bits))
        return packed_indices, pack_bits(bits), torch.stack(halves, dim=1).bfloat16()

    def _decode(self, packed_indices: Tensor, packed_bits: Tensor, sizes_C2: Tensor) -> Tensor:
        """The chunks, with zeros where nothing was sent."""
        index_bits = unpack_bits(packed_indices)[:, : self._topk * self._index_bits]
        indices_CK = bits_to_ints(index_bits, self._index_bits)
        is_negative_CK, is_large_CK = unpack_bits(packed_bits)[:, : 2 * self._topk].long().chunk(2, dim=1)
        values_CK = sizes_C2.float().gather(1, is_large_CK) * (1 - 2 * is_negative_CK)
        blocks_CE = values_CK.new_zeros(len(values_CK), self._blocks.length)
        return blocks_CE.scatter_(1, indices_CK, values_CK)

    def exchange(self, message: Message, wire: Wire) -> Message:
        """Everyone's."""
        return gather(message, wire) if message else ()

    def apply(self, exchanged: Message) -> None:
        """The outer step."""
        if not exchanged:
            return
        decoded = (self._decode(*one) for one in zip(*exchanged, strict=True))
        change_N = self._blocks.join(mean_of(decoded, len(exchanged[0])))
        self._flat.set_values(self.state["start"].sub_(change_N, alpha=self._outer_lr))


def _mean_where(sizes_CK: Tensor, where_CK: Tensor) -> Tensor:
    """A row's mean over some of its elements; zero where there are none."""
    return (sizes_CK * where_CK).sum(dim=1) / where_CK.sum(dim=1).clamp(min=1)
