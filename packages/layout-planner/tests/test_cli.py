"""The command line prints what it computed, and says in one line what is wrong."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from layout_planner import Layout, Rows
from layout_planner._cli import main
from layout_planner._sweep import Options, measure
from layout_planner.models import load_model


def run(capsys, command):
    """What a command prints, which must succeed."""
    status = main(command.split() if isinstance(command, str) else command)
    shown = capsys.readouterr()
    assert (status, shown.err) == (0, "")
    return shown.out


def fails(capsys, command):
    """The one line that a refused command writes to stderr."""
    try:
        status: object = main(command.split() if isinstance(command, str) else command)
    except SystemExit as stopped:  # argparse's own way out
        status = stopped.code
    shown = capsys.readouterr()
    assert (status, shown.out) == (2, "")
    assert shown.err.endswith("\n")
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("layout-planner: error: ")
    return shown.err


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def table(text):
    """The rows of the first Markdown table, as dicts by header."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [dict(zip(cells(lines[0]), cells(line), strict=True)) for line in lines[2:]]


PLAN = "plan --model gpt-oss-120b --world-size 128 --block rows:32"


def test_plan_shows_each_group_and_totals_over_all_layers(capsys):
    text = run(capsys, PLAN)
    rows = table(text)
    assert [row["group"] for row in rows] == ["embed", "layers.0-35", "head", "total"]
    assert rows[1]["layers"] == "36"
    assert rows[1]["tensors"] == "17"
    assert rows[1]["parameters"] == "3,213,080,192"
    assert rows[1]["shard size"].replace(",", "").split(" + ")[0].isdecimal()
    assert rows[1]["bounded by"] in ("elements", "blocks", "grids")
    assert rows[1]["gap"].endswith("%")
    assert (rows[-1]["layers"], rows[-1]["parameters"]) == ("38", "116,829,156,672")
    found = measure(load_model("gpt-oss-120b"), 128, Rows(32), Options())
    assert rows[-1]["padding"] == f"{100 * found.padding():.2f} %"
    assert "bf16: 1.83 GB per rank" in text


def test_plan_as_json_holds_layouts_that_can_be_read_back(capsys):
    found = json.loads(run(capsys, f"{PLAN} --json"))
    layouts = [Layout.from_json(json.dumps(group["layout"])) for group in found["groups"]]
    assert [layout.fingerprint() for layout in layouts] == [group["fingerprint"] for group in found["groups"]]
    padded = sum(
        group["layers"] * layout.padded_numel for group, layout in zip(found["groups"], layouts, strict=True)
    )
    assert found["padded_numel"] == padded


def test_plan_reads_a_checkpoint(capsys, tmp_path):
    from .test_checkpoints import layers, write

    write(tmp_path / "model.safetensors", layers(range(4)))
    rows = table(run(capsys, ["plan", "--checkpoint", str(tmp_path), "--world-size", "2"]))
    assert rows[0]["group"] == "model.layers.0-3"
    assert rows[-1]["parameters"] == "112"


def test_options_of_the_command_line_reach_the_planner(capsys):
    wide = json.loads(run(capsys, "plan --model llama-3-8b --world-size 24 --align 64 --json"))
    assert all(segment["shard_size"] % 64 == 0 for g in wide["groups"] for segment in g["layout"]["segments"])
    single = json.loads(
        run(capsys, "plan --model gpt-oss-120b --world-size 1024 --block rows:16 --segments 1 --json")
    )
    assert all(len(group["layout"]["segments"]) == 1 for group in single["groups"])


SWEEP = "sweep --model gpt-oss-120b --world-size 64..1024 --block rows:1,rows:16"


def test_sweep_sets_ours_beside_both_rules_and_the_bound(capsys):
    rows = table(run(capsys, SWEEP))
    assert [(row["block"], row["ranks"]) for row in rows[:6]] == [
        *(("rows:1", str(size)) for size in (64, 128, 256, 512, 1024)),
        ("rows:16", "64"),
    ]
    found = measure(load_model("gpt-oss-120b"), 1024, Rows(1), Options())
    assert rows[4]["even rows"] == f"{100 * found.padding(found.even_rows):.0f} %"
    assert rows[4]["lcm"] == f"{100 * found.padding(found.lcm):.0f} %"
    assert rows[4]["ours"] == f"{100 * found.padding():.2f} %"
    assert {"lower bound", "gap", "per rank, bf16"} <= set(rows[4])


@pytest.mark.parametrize(
    ("text", "sizes"), [("8", [8]), ("8,24", [8, 24]), ("8..64", [8, 16, 32, 64]), ("8..20", [8, 16])]
)
def test_world_sizes_are_lists_and_doublings(capsys, text, sizes):
    found = json.loads(run(capsys, f"sweep --model llama-3-8b --world-size {text} --block rows:1 --json"))
    assert [row["world_size"] for row in found["measures"]] == sizes


def test_draw_writes_a_picture_of_the_largest_group(capsys, tmp_path):
    path = tmp_path / "layout.svg"
    command = f"draw --model gpt-oss-120b --world-size 128 --block rows:32 -o {path}"
    assert "padding 0." in run(capsys, command)
    picture = ElementTree.parse(path).getroot()
    assert picture.tag.endswith("svg")
    assert "gpt-oss-120b layers.0-35: one of 36 equal layers, 128 ranks, rows:32" in path.read_text()


def test_draw_takes_a_group_and_ranks_and_writes_to_standard_output(capsys):
    text = run(capsys, "draw --model gpt-oss-120b --world-size 128 --group head --ranks 3..4 -o -")
    ElementTree.fromstring(text)
    assert "lm_head.weight" in text
    assert ">rank 3<" in text
    assert ">rank 5<" not in text


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("plan --model gpt-6 --world-size 8", "unknown model 'gpt-6'; known models: llama-3-8b"),
        ("plan --model llama-3-8b --world-size 0", "--world-size: '0' is not an integer from 1"),
        ("plan --model llama-3-8b --world-size -8", "--world-size: '-8' is not an integer from 1"),
        ("plan --model llama-3-8b --world-size eight", "'eight' is not an integer"),
        ("plan --model llama-3-8b", "--world-size"),
        ("plan --world-size 8", "--model --checkpoint"),
        ("plan --model llama-3-8b --checkpoint x --world-size 8", "not allowed with"),
        ("plan --model llama-3-8b --world-size 8 --block rows:0", "--block: block 'rows:0'"),
        (
            "plan --model llama-3-8b --world-size 8 --block bricks",
            "'bricks' is not a known kind; write rows:N",
        ),
        ("plan --model llama-3-8b --world-size 8 --align 0", "--align: '0' is not an integer from 1"),
        ("plan --model llama-3-8b --world-size 8 --segments 0", "--segments: '0' is not"),
        ("plan --checkpoint /no/such/place --world-size 8", "/no/such/place: no such file or folder"),
        ("sweep --model llama-3-8b --world-size 64..8", "'64..8' runs from 64 down to 8"),
        ("sweep --model llama-3-8b --world-size 8,,16", "'' is not an integer from 1"),
        ("draw --model llama-3-8b --world-size 8 --group tail -o -", "has no group 'tail'; it has embed"),
        (
            "draw --model llama-3-8b --world-size 8 --ranks 0..8 -o -",
            "expected one or more of the 8 ranks 0..7",
        ),
        ("draw --model llama-3-8b --world-size 8 --ranks 4..2 -o -", "'4..2' runs from 4 down to 2"),
        ("draw --model llama-3-8b --world-size 8 --ranks all -o -", "'all' is not a rank"),
        ("draw --model llama-3-8b --world-size 8 -o /no/such/folder/x.svg", "/no/such/folder/x.svg"),
        ("paint", "invalid choice: 'paint'"),
        ("plan --checkpoint . --world-size 8 --experts separate", "--experts is for --model"),
        *(
            (f"sweep --model llama-3-8b --world-size {ranks}", "is not an integer from 1 to 1048576")
            for ranks in ("1048577", "9" * 4000, "8..1048577", "1048577..2")
        ),
    ],
)
def test_bad_input_is_one_line_that_says_what_was_found_and_exit_status_2(capsys, command, said):
    assert said in fails(capsys, command)


def test_experts_can_be_planned_separately(capsys):
    command = "plan --model deepseek-v3 --world-size 512 --block rows:128"
    stacked, separate = table(run(capsys, command)), table(run(capsys, command + " --experts separate"))
    assert [row["tensors"] for row in (stacked[2], separate[2])] == ["16", "782"]
    assert stacked[2]["parameters"] == separate[2]["parameters"]
    assert float(separate[2]["padding"].split()[0]) < 3 < float(stacked[2]["padding"].split()[0])


def test_the_module_runs_as_a_program_and_exits_with_the_status():
    def program(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "layout_planner", *arguments], capture_output=True, text=True
        )

    good = program("plan", "--model", "llama-3-8b", "--world-size", "8")
    assert (good.returncode, good.stderr) == (0, "")
    assert "8,030,261,248" in good.stdout
    bad = program("plan", "--model", "gpt-6", "--world-size", "8")
    assert bad.returncode == 2
    assert bad.stderr.count("\n") == 1


def test_a_reader_that_goes_away_ends_the_program_quietly():
    sweep = ["-m", "layout_planner", "sweep", "--model", "llama-3-8b", "--world-size", "8..99"]
    command = [sys.executable, *sweep]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        program.stdout.close()
        assert program.stderr.read() == b""
        assert program.wait() == 1
