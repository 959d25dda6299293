import json

from lightning_tricks.composition.event_log import append_event, read_events


def test_lines_are_json_also_of_what_is_not_finite(tmp_path) -> None:
    path = tmp_path / "new" / "events.jsonl"
    append_event(path, {"step": 3, "loss": float("nan"), "norm": float("-inf")})
    append_event(path, {"step": 4, "loss": 1.5, "norm": float("inf")})

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines == [{"step": 3, "loss": "nan", "norm": "-inf"}, {"step": 4, "loss": 1.5, "norm": "inf"}]
    assert read_events(path) == lines


def test_half_a_line_costs_no_other(tmp_path) -> None:
    path = tmp_path / "events.jsonl"
    append_event(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')  # killed
    assert read_events(path) == [{"step": 1}]
    append_event(path, {"step": 3})
    assert read_events(path) == [{"step": 1}, {"step": 3}]


def test_no_file_no_events(tmp_path) -> None:
    assert read_events(tmp_path / "none.jsonl") == []
