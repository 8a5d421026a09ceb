"""The command that runs cases on several hosts, without the hosts."""

from tools.multihost import __main__ as command


def test_a_slow_start_is_a_row_of_the_table_and_the_other_cases_run(monkeypatch, capsys):
    def slow(bench):
        raise TimeoutError("no step 12 within 60 s")

    def fine(bench):
        return command.Result("fine", True, 1.0, 1e-7, "", (4, 4), "")

    monkeypatch.setattr(command, "CASES", {"slow": slow, "fine": fine})
    monkeypatch.setattr(command, "obstacle", lambda: "")
    monkeypatch.setattr(command, "one_process", lambda folder: {})
    assert command.main([]) == 1
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].startswith("| slow | **wrong**: no step 12 within 60 s | ")
    assert rows[1].startswith("| fine | finished | ")
