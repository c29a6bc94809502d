from dlm.evaluation.table import markdown


def test_columns_follow_the_headings():
    rows = [{"rule": "margin", "n": 1000, "tpf": 1.5, "extra": 3}, {"rule": "a|b", "n": None}]
    lines = markdown(rows, {"n": "puzzles", "rule": "rule", "tpf": "TPF"}).splitlines()
    assert lines[0] == "| puzzles | rule   |  TPF |"
    assert lines[1] == "| ------: | ------ | ---: |"
    assert lines[2] == "|   1,000 | margin | 1.50 |"
    assert lines[3] == "|       – | a\\|b   |    – |"


def test_first_row_names_the_columns_by_itself():
    assert markdown([{"a": 1}]).splitlines()[0] == "| a |"
    assert markdown([]) == "*nothing measured*"
