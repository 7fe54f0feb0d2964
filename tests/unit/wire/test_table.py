import pytest

from thinwire.wire.__main__ import main, table


def test_the_table_has_the_target_row(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| 32 |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:4] == ["elias_fano", "9.00", "8.32"]
    assert cells[-2] == "10.00"


def test_small_chunks_have_fewer_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(table(5).splitlines()) == 2 + 3
    with pytest.raises(SystemExit):
        main(["--elements", "0"])
    assert "must be at least 1" in capsys.readouterr().err
