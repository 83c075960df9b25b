"""The command line: arguments → verify → exit code. The only place that prints and the only one that exits."""

from __future__ import annotations

import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import seatrial
from seatrial.errors import InfrastructureError, UsageError
from seatrial.model import Report

app = typer.Typer(
    name="seatrial",
    help="Sea trials for GPU kernels: may this kernel go into real training and inference?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

STARTED = time.monotonic()  # before anything slow is imported: the time of an audit counts from here
EXIT_USAGE = 2
EXIT_INCONCLUSIVE = 3
EXIT_BUG = 4
EXIT_INTERRUPTED = 130


def _out(text: str) -> Any:
    return typer.Option(metavar="PATH", show_default=False, help=text)


def _seed(given: int | None) -> int | None:
    if given is not None and given < 0:
        raise UsageError(f"--seed {given} is below 0; give the seed of an earlier report, or leave --seed out")
    return given


JsonPath = Annotated[Path | None, _out("Write the whole report as JSON (docs/report-schema.json).")]
HtmlPath = Annotated[Path | None, _out("Write the report as one self-contained page.")]
MarkdownPath = Annotated[Path | None, _out("Write the report as a comment for a pull request.")]
JunitPath = Annotated[Path | None, _out("Write JUnit XML, one test case per check, for the test tab of a CI.")]
SarifPath = Annotated[Path | None, _out("Write SARIF 2.1.0, for code scanning.")]
TracesPath = Annotated[
    Path | None,
    _out("Write SOL-ExecBench trace lines: what the benchmark's own rule says of each workload, nothing timed."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on stderr, errors only.")]
Device = Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda[:N]", help="Where the candidate runs.")]
PolicyName = Annotated[str, typer.Option("--policy", metavar="quick|standard|deep", help="How thorough.")]
Seed = Annotated[
    int | None, typer.Option("--seed", callback=_seed, help="Replay the inputs of an earlier run; fresh otherwise.")
]
EntryPoint = Annotated[
    str | None,
    typer.Option(
        "--entry-point", metavar="FUNCTION", help="For a bare .py file: the function to call (NAME, or FILE.py::NAME)."
    ),
]
Only = Annotated[list[str] | None, typer.Option("--only", metavar="CHECK", help="Run this check alone (repeatable).")]
Skip = Annotated[list[str] | None, typer.Option("--skip", metavar="CHECK", help="Leave this check out (repeatable).")]

Reproducers = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", show_default=False, help="Write the smallest case of every objection there, as a Python file."
    ),
]


def main() -> None:
    """Run the command line; maps what went wrong to the documented exit codes."""
    # Threads that spin while they wait slow each other down a hundredfold on a machine that is busy with anything else.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        code = app(standalone_mode=False)
    except UsageError as error:
        _say(f"seatrial: {error}")
        sys.exit(EXIT_USAGE)
    except InfrastructureError as error:
        _say(f"seatrial: could not verify: {error}")
        sys.exit(EXIT_INCONCLUSIVE)
    except (KeyboardInterrupt, typer.Abort):
        _say("seatrial: interrupted; nothing is claimed about the candidate")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.exit(EXIT_USAGE)
    except Exception as error:  # noqa: BLE001 - the outer boundary: what arrives here is our bug, and is said so
        sys.exit(_usage_or_bug(error))
    sys.exit(code if isinstance(code, int) else 0)


def _usage_or_bug(error: Exception) -> int:
    # Typer vendors or wraps click depending on its version; every one of its usage errors has these two.
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        _say(f"seatrial: {error.format_message()} (see `seatrial --help`)")
        return EXIT_USAGE
    _say("seatrial: a fault of seatrial itself, not of the candidate; please report it with these lines:")
    _say("".join(traceback.format_exception(error)))
    return EXIT_BUG


def _say(text: str) -> None:
    sys.stderr.write(text.rstrip("\n") + "\n")


# -- check ------------------------------------------------------------------------------------------


@app.command()
def check(
    problem: Annotated[Path, typer.Argument(help="Folder with definition.json and workload.jsonl.")],
    candidates: Annotated[list[Path], typer.Argument(help="solution.json, or a bare .py file; one or more.")],
    entry_point: EntryPoint = None,
    device: Device = "auto",
    policy: PolicyName = "standard",
    seed: Seed = None,
    only: Only = None,
    skip: Skip = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first proven fault.")] = False,  # noqa: FBT002 - a flag
    strict: Annotated[bool, typer.Option("--strict", help="Accepted with limits exits 1.")] = False,  # noqa: FBT002 - a flag
    any_layout: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--any-layout", help="Demand right values for inputs of any layout, not only dense ones.")
    ] = False,
    json: JsonPath = None,
    html: HtmlPath = None,
    markdown: MarkdownPath = None,
    junit: JunitPath = None,
    sarif: SarifPath = None,
    traces: TracesPath = None,
    reproducers: Reproducers = None,
    quiet: Quiet = False,  # noqa: FBT002 - a flag
) -> int:
    """Judge one or more candidates: exit 0 accepted, 1 rejected, 3 inconclusive, 2 usage."""
    outputs = {"json": json, "html": html, "markdown": markdown, "junit": junit, "sarif": sarif, "traces": traces}
    _ready(outputs)
    reports = _verify(
        problem,
        candidates,
        entry_point,
        device,
        policy,
        seed,
        tuple(only or ()),
        tuple(skip or ()),
        fail_fast=fail_fast,
        strict=strict,
        any_layout=any_layout,
        quiet=quiet,
        reproducers=reproducers,
    )
    _show(reports)
    _write(reports, outputs, quiet=quiet)
    return _exit_code(reports, strict=strict)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A file that `seatrial check --reproducers` wrote.")],
    candidate: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Judge this candidate instead: solution.json or a .py file.")
    ] = None,
    entry_point: EntryPoint = None,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda[:N]", help="Where; as in the audit otherwise.")] = "",
) -> int:
    """Judge one finding again: exit 1 it still shows, 0 no longer, 2 unusable file, 3 could not be run."""
    from seatrial.reproduce.replay import replay as replay_file

    replayed = replay_file(file, candidate=candidate, entry_point=entry_point, device=device)
    sys.stdout.write(f"{replayed.words}\n")
    if replayed.case:
        sys.stdout.write(f"{replayed.case}\n")
    return 1 if replayed.shows else 0


@app.command()
def train(
    problem: Annotated[Path, typer.Argument(help="Folder with definition.json and workload.jsonl.")],
    candidates: Annotated[list[Path], typer.Argument(help="solution.json, or a bare .py file; one or more.")],
    entry_point: EntryPoint = None,
    device: Device = "auto",
    policy: PolicyName = "standard",
    seed: Seed = None,
    json: JsonPath = None,
    html: HtmlPath = None,
    quiet: Quiet = False,  # noqa: FBT002 - a flag
) -> int:
    """Run the training matrix alone: data × optimizer, against honest controls."""

    from seatrial.api import policy_named

    outputs = {"json": json, "html": html}
    _ready(outputs)
    chosen = replace(policy_named(policy), trial=True)
    only = ("does-not-load", "training-divergence")
    reports = _verify(problem, candidates, entry_point, device, chosen, seed, only, (), command="train", quiet=quiet)
    _show(reports)
    _write(reports, outputs, quiet=quiet)
    return _exit_code(reports, strict=False)


@app.command()
def demo(
    html: Annotated[Path, typer.Option(metavar="PATH", help="Where the page goes.")] = Path("seatrial-demo.html"),
    json: JsonPath = None,
    device: Device = "cpu",
    seed: Seed = None,
    examples: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The examples folder, when not beside the source.")
    ] = None,
    quiet: Quiet = False,  # noqa: FBT002 - a flag
) -> int:
    """The origin case: a kernel that its benchmark passes, and that breaks a training run."""
    folder = _examples(examples) / "embedding_rmsnorm_backward"
    pair = [folder / "candidates" / f"{name}{_suffix(device)}.json" for name in ("faulty", "honest")]
    outputs = {"html": html, "json": json}
    _ready(outputs)
    reports = _verify(folder, pair, None, device, "demo", seed, (), (), quiet=quiet)
    _show(reports, compact=True)
    _write(reports, outputs, quiet=quiet)
    verdicts = [r.verdict.value for r in reports]
    sys.stdout.write(f"\nEvery objection, curve and limit is on the page: {html}\nAs text, for the faulty kernel:\n")
    sys.stdout.write(f"{reports[0].replay}\n")
    if verdicts != ["rejected", "accepted"]:
        _say(f"seatrial: the demo expected rejected and accepted, and got {', '.join(verdicts)}")
        return EXIT_INCONCLUSIVE
    return 0


def _suffix(device: str) -> str:
    from seatrial.devices import pick

    return "_triton" if pick(device).name.startswith("cuda") else ""


def _examples(given: Path | None) -> Path:
    places = [given] if given else [Path("examples"), Path(seatrial.__file__).resolve().parents[2] / "examples"]
    for place in places:
        if (place / "embedding_rmsnorm_backward" / "definition.json").is_file():
            return place
    raise UsageError(
        f"the demo's example is not in {' or '.join(str(p) for p in places)}; give the repository's examples folder "
        "with --examples"
    )


@app.command()
def adequacy(
    problem: Annotated[Path, typer.Argument(help="Folder with definition.json and workload.jsonl.")],
    device: Device = "auto",
    policy: PolicyName = "standard",
    seed: Seed = None,
    json: Annotated[Path | None, _out("Write every planted fault and what became of it as JSON.")] = None,
) -> int:
    """Say how strong the inputs are: faults planted in the reference, and which of them the audit exposes."""
    from seatrial.adequacy.score import measure
    from seatrial.adequacy.words import lines
    from seatrial.api import policy_named
    from seatrial.devices import pick
    from seatrial.formats import load_problem
    from seatrial.study import Study
    from seatrial.verify import fresh_seed

    _ready({"json": json})
    chosen = policy_named(policy)
    study = Study(load_problem(problem), chosen, pick(device), fresh_seed() if seed is None else seed)
    measured = measure(study, chosen.adequacy_s, mutants=chosen.mutants, benchmark=True)
    for line in lines(study.problem.name, measured):
        sys.stdout.write(line + "\n")
    sys.stdout.write(f"seed {study.seed}, policy {chosen.name}, {study.device.name}\n")
    if json is not None:
        try:
            json.write_text(measured.model_dump_json(indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {json}: {error.strerror}; give another path with --json") from error
    return 0


# -- about ------------------------------------------------------------------------------------------


@app.command()
def checks() -> None:
    """List the checks."""
    from seatrial.checks import CHECKS

    for name, module in CHECKS.items():
        sys.stdout.write(f"{name:22} {module.TITLE}\n")


@app.command()
def explain(name: Annotated[str, typer.Argument(metavar="CHECK", help="A name from `seatrial checks`.")]) -> None:
    """Show the page of one check."""
    import inspect

    from seatrial.verify import selected

    module = selected((name,), ())[0]
    sys.stdout.write(f"{name}: {module.TITLE}\n\n{inspect.cleandoc(module.__doc__ or '')}\n")


@app.command()
def doctor() -> None:
    """Say what this machine can and cannot verify, and why."""
    from seatrial.doctor import examine

    for line in examine():
        sys.stdout.write(line + "\n")


@app.command()
def version() -> None:
    """Print the version."""
    sys.stdout.write(seatrial.__version__ + "\n")


# -- shared -----------------------------------------------------------------------------------------


def _verify(
    problem: Path,
    candidates: list[Path],
    entry_point: str | None,
    device: str,
    policy: Any,
    seed: int | None,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    *,
    fail_fast: bool = False,
    strict: bool = False,
    any_layout: bool = False,
    command: str = "check",
    quiet: bool = False,
    reproducers: Path | None = None,
) -> list[Report]:
    from seatrial.api import policy_named
    from seatrial.devices import pick
    from seatrial.formats import load_candidates, load_problem
    from seatrial.progress import shown
    from seatrial.verify import Options, fresh_seed, selected, verify

    selected(only, skip)  # a misspelt name is said before anything slow begins
    named = policy_named(policy)
    chosen = replace(named, any_layout=any_layout or named.any_layout)
    place = pick(device)
    loaded = load_problem(problem)
    kernels = load_candidates(candidates, entry_point=entry_point, problem=loaded)
    with shown(sys.stderr, quiet=quiet) as progress:
        options = Options(
            policy=chosen,
            device=place,
            seed=fresh_seed() if seed is None else seed,
            only=only,
            skip=skip,
            fail_fast=fail_fast,
            strict=strict,
            command=command,
            progress=progress,
            reproducers=reproducers,
            started=STARTED,
        )
        return verify(loaded, kernels, options)


def _show(reports: list[Report], *, compact: bool = False) -> None:
    from rich.console import Console

    from seatrial.report.terminal import render, render_compact

    (render_compact if compact else render)(reports, Console(soft_wrap=not sys.stdout.isatty()))


def _ready(outputs: dict[str, Path | None]) -> None:
    """A report that cannot be written is said before the audit, not after it."""
    from seatrial.report import check_paths

    check_paths(outputs)


def _write(reports: list[Report], outputs: dict[str, Path | None], *, quiet: bool) -> None:
    from seatrial.report import write

    wanted = {kind: path for kind, path in outputs.items() if path is not None}
    for kind, path in wanted.items():
        write(kind, reports, path)
    if wanted and not quiet:
        _say(f"Wrote {', '.join(map(str, wanted.values()))}")


def _exit_code(reports: list[Report], *, strict: bool) -> int:
    from seatrial.verify import worst_of

    return worst_of(reports).exit_code(strict=strict)


if __name__ == "__main__":
    main()
