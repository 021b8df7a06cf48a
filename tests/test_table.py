"""The list of models: counted, in its page as it is in the code."""

import json
from pathlib import Path

import pytest
from small_models import family_names

from soft_models import __main__ as command
from soft_models.registry import registered_names
from soft_models.table import MARKERS, Row, describe, markdown, replace_table

ROOT = Path(__file__).parent.parent
MODELS = ROOT / "docs" / "models.md"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [describe(name) for name in family_names()]


def page_rows() -> list[str]:
    """Lines of the page's table, without its head."""
    start, end = MARKERS
    text = MODELS.read_text(encoding="utf-8")
    return text.partition(start)[2].partition(end)[0].strip().splitlines()[2:]


def test_page_lists_every_model() -> None:
    names = [line.split("`")[1] for line in page_rows()]
    assert names == registered_names(), "the table is stale: run `make table`"


def test_page_holds_the_counts_of_each_family(rows: list[Row]) -> None:
    missing = [line for line in list(markdown(rows))[2:] if line not in page_rows()]
    assert not missing, "the table is stale: run `make table`"


@pytest.mark.slow
def test_page_holds_the_table_of_the_code() -> None:
    text = MODELS.read_text(encoding="utf-8")
    table = "\n".join(markdown(map(describe, registered_names())))
    assert replace_table(text, table) == text, "the table is stale: run `make table`"


def test_inverse_has_its_known_cost() -> None:
    # Tiny: 20 steps of 2 products of 49 x 49 matrices, for 2, 8 and 30 heads in stages 1 to 3.
    tiny = describe("soft_conv_tiny")
    assert tiny.inverse_multiply_adds == pytest.approx(20 * 2 * 49**3 * (1 * 2 + 2 * 4 + 3 * 10), rel=0.01)


def test_published_accuracy_is_read_from_the_entry_point() -> None:
    assert [describe(name).published_top1 for name in ("soft_tiny", "soft_norm_tiny")] == [79.3, 79.4]


def test_command_prints_table_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "registered_names", lambda: ["soft_tiny"])
    assert command.main([]) == 0
    table = capsys.readouterr().out
    assert command.main(["--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["name"] == "soft_tiny"
    assert f"| `soft_tiny` | {row['parameters'] / 1e6:.2f} M |" in table


def test_two_forms_at_once_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--json", "--update", str(tmp_path / "table.md")])
    assert "not allowed with argument --json" in capsys.readouterr().err


def test_rows_come_as_they_are_counted(
    rows: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[int] = []

    def describe(name: str) -> Row:
        shown.append(len(capsys.readouterr().out.splitlines()))
        return rows[0]

    monkeypatch.setattr(command, "registered_names", lambda: ["a", "b", "c"])
    monkeypatch.setattr(command, "describe", describe)
    assert command.main([]) == 0
    assert shown == [2, 1, 1]


def test_update_rewrites_between_the_markers_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "registered_names", lambda: ["soft_tiny"])
    file = tmp_path / "README.md"
    start, end = MARKERS
    file.write_text(f"before\n{start}\nstale\n{end}\nafter\n", encoding="utf-8")
    assert command.main(["--update", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{start}\n| name |")
    assert text.endswith(f" |\n{end}\nafter\n")
    assert "stale" not in text
    file.write_text("no markers", encoding="utf-8")
    assert command.main(["--update", str(file)]) == 2
    assert "must hold the markers" in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == "no markers"
