"""Measure what a model loses: against another model, on a text, or with fewer bits in its cache."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .._version import __version__
from ..util.words import counted
from .common.console import human_bytes, tell
from .common.groups import Commands
from .common.options import ABOVE_ZERO, complete_model, ignore_option
from .common.stages import Stages, stages

if TYPE_CHECKING:
    from ..evaluation.figures import Difference, Figures
    from ..evaluation.images import ImageFigures
    from ..evaluation.kv import KVEvaluation, KVLoss
    from ..evaluation.measure import Comparison, Reading
    from ..evaluation.texts import Windows

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group(cls=Commands, short_help="Measure what a model loses.")
def eval() -> None:
    """Measure what models lose: KL divergence, likeliest tokens and perplexity at 4,096 positions of a text, with standard errors.

    Models are loaded one after another. Results of the first are kept in memory, or on disk if they are large.
    """


def _reading_options(length: int, positions: int = 4096) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        for option in reversed(_options(length, positions)):
            command = option(command)
        return command

    return add


def _options(length: int, positions: int) -> list[Callable[[Any], Any]]:
    return [
        click.option("--text", metavar="FILE", help="A text, .jsonl or .parquet file, a folder, or a data set in the hub's cache.  "
                     "[default: Python's documentation]"),
        click.option("--positions", type=click.IntRange(64), default=positions, show_default=True, help="Positions to compare, at most."),
        click.option("--window", type=click.IntRange(16), default=length, show_default=True, help="Tokens that are read together."),
        click.option("--dtype", default="float32", show_default=True, help="Compute in float32, bfloat16 or float16."),
        click.option("--memory", "memory_gb", type=ABOVE_ZERO, metavar="GB", help="Use at most this much for a model."),
        ignore_option,
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    ]  # fmt: skip


_kv = click.option("--kv", default="16", show_default=True, help="Bits of cached keys and values of every model but the teacher.")
_cache = click.option(
    "--cache", type=click.Path(path_type=Path), metavar="FOLDER", help="Keep the teacher's results in this folder, for later runs."
)


@eval.command(short_help="Compare a model with the one it was made from.")
@click.argument("teacher", shell_complete=complete_model)
@click.argument("student", shell_complete=complete_model)
@_reading_options(256)
@_kv
@_cache
def kl(teacher: str, student: str, as_json: bool, **options: Any) -> None:
    """Compare STUDENT with TEACHER, which is the model it was made of: KL divergence in nats, and the share of equal likeliest tokens."""
    found = _compared(teacher, [student], options)
    if as_json:
        click.echo(json.dumps(_without_nan({"teacher": found.teacher.model, **asdict(found.students[0]), **_text_object(found.text)})))
        return
    _heading(found)
    click.echo("\n".join(_kl_lines(found.students[0])))


@eval.command(short_help="Measure the perplexity of a text.")
@click.argument("model", shell_complete=complete_model)
@_reading_options(256)
def ppl(model: str, as_json: bool, **options: Any) -> None:
    """Measure the perplexity of a text for MODEL. It says little about what a conversion lost: use kl for that."""
    from ..evaluation.measure import perplexity

    with _ignoring([model], options), stages() as shown:
        found, text, notes = perplexity(model, _reading(options), shown.tell)
    _tell(notes)
    if as_json:
        kept = {name: value for name, value in asdict(found).items() if not name.startswith(("kl_", "top1", "ppl_ratio"))}
        click.echo(json.dumps(_without_nan({**kept, **_text_object(text)})))
        return
    click.echo(f"{found.model}: {_size_text(found)}\n{_text_line(text)}\nperplexity {_plus_minus(found.ppl, found.ppl_stderr, 3)}")


@eval.command(short_help="Compare several models, in a table.")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...", shell_complete=complete_model)
@click.option("--teacher", metavar="MODEL", shell_complete=complete_model, help="Model to compare the others with.  [default: the first]")
@click.option("--picture", type=click.Path(path_type=Path), metavar="FILE", help="Draw KL divergence over bits per weight: .svg or .png.")
@_reading_options(256)
@_kv
@_cache
def compare(models: tuple[str, ...], teacher: str | None, picture: Path | None, as_json: bool, **options: Any) -> None:
    """Compare models with the first of them, or with --teacher: a table, and the differences between neighbours with their errors."""
    from ..evaluation.picture import check_picture, draw

    if teacher is None and len(models) < 2:
        raise click.UsageError("compare needs two models: name another one, or --teacher")
    if picture is not None:
        check_picture(picture)
    found = _compared(teacher or models[0], list(models) if teacher else list(models[1:]), options)
    if picture is not None:
        draw(found.students, found.teacher.model, picture)
    _show_comparison(found, as_json)


@eval.command(short_help="Measure what fewer bits in the cache lose.")
@click.argument("model", shell_complete=complete_model)
@click.option("--limit", type=ABOVE_ZERO, help="Mean KL divergence in nats that --kv auto may have.  [default: 0.005]")
@click.option("--layers/--no-layers", default=False, show_default=True, help="Measure each layer's keys and values alone, too (slow).")
@_reading_options(512, 2048)
def kv(model: str, limit: float | None, layers: bool, as_json: bool, **options: Any) -> None:
    """Measure what fewer bits of cached keys and values lose in MODEL, against 16. What it finds is kept: --kv auto uses it."""
    from ..evaluation.kv import evaluate_kv
    from ..loading.find.resolve import resolve
    from ..loading.memory.kv_choice import LIMIT, save_choice

    limit = LIMIT if limit is None else limit
    with _ignoring([model], options), stages() as shown:
        found, text = evaluate_kv(model, _reading(options), limit, layers=layers, tell=partial(shown.tell, unit="windows"))
    kept = {"formats": [asdict(each) for each in found.formats], **_text_object(text)}
    save_choice(resolve(model).path, found.auto, limit, found.kl_auto, _without_nan(kept))
    if as_json:
        click.echo(json.dumps(_without_nan({**asdict(found), "limit": limit, **_text_object(text)})))
        return
    click.echo(f"{found.model}: {found.positions:,} positions, {text.name}")
    _kv_table(found)
    click.echo(f"--kv auto: {found.auto}, the fewest bits with a mean KL divergence of at most {limit:g}")


@eval.command(short_help="Ask questions about pictures.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("models", nargs=-1, required=True, metavar="MODEL...", shell_complete=complete_model)
@click.option("--prompt", default="", metavar="TEXT", help='Text after each question, such as "Answer with one word."')
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Longest answer.")
@click.option("--answers", is_flag=True, help="Print each answer.")
@click.option("--dtype", help="Compute in float32, bfloat16 or float16.  [default: the fastest]")
@click.option("--memory", "memory_gb", type=ABOVE_ZERO, metavar="GB", help="Use at most this much for a model.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def images(file: Path, models: tuple[str, ...], prompt: str, max_tokens: int, answers: bool, as_json: bool, **options: Any) -> None:
    """Ask models the questions of FILE about pictures, and count right answers.

    FILE has JSON lines: {"image": "cat.png", "question": "What is this?", "answer": ["cat", "a cat"]}. Paths are relative to FILE.
    """
    from ..evaluation.images import evaluate_images, read_questions

    questions = read_questions(file)
    settings = {name: value for name, value in options.items() if value is not None}
    with stages() as shown:
        ask = partial(evaluate_images, questions=questions, max_tokens=max_tokens, prompt=prompt, settings=settings)
        found = [ask(model, done=partial(_tell_questions, shown, model, len(questions))) for model in models]
    if as_json:
        click.echo(json.dumps({"file": str(file), "questions": len(questions), "models": [_image_object(each) for each in found]}))
        return
    click.echo(f"{counted(len(questions), 'question')} of {file}")
    for each in found:
        click.echo("\n".join(_image_lines(each, answers=answers)))


def _tell_questions(shown: Stages, model: str, total: int, done: int) -> None:
    shown.tell(model, done, total, "questions")


def _image_lines(found: ImageFigures, *, answers: bool) -> Iterator[str]:
    for one in found.answered if answers else ():
        yield f"{'right' if one.exact else 'wrong'}  {one.question.text}  {one.answer!r}  ({one.question.answers[0]})"
    shares = (("exact", found.exact), ("contained", found.contained), ("ANLS", found.anls))
    told = " · ".join(f"{name} {_plus_minus(value.mean, value.stderr, 3)}" for name, value in shares)
    yield f"{found.model}: {told} · {found.image_tokens:.0f} image tokens a question"


def _image_object(found: ImageFigures) -> dict[str, Any]:
    shares = {name: asdict(getattr(found, name)) for name in ("exact", "contained", "anls")}
    told = [{"question": each.question.text, "answer": each.answer, "exact": each.exact, "anls": each.anls} for each in found.answered]
    return {"model": found.model, **shares, "image_tokens": found.image_tokens, "answers": told}


@contextmanager
def _ignoring(models: list[str], options: dict[str, Any]) -> Iterator[None]:
    """Ignore the keys of `--ignore-config-key` for models that have them. Raises `SettingError` for a key that no model has."""
    from ..loading.find.resolve import resolve
    from ..loading.load import open_checkpoint
    from ..models.config_reader import check_ignored, ignoring

    keys, configs = options["ignore_config_keys"], []
    with ExitStack() as stack:
        for model in models if keys else ():
            path = resolve(model).path
            stack.enter_context(ignoring(path, keys))
            with closing(open_checkpoint(path)) as checkpoint:
                configs.append(checkpoint.config)
        if keys:
            check_ignored(keys, *configs)
            tell(f"note: keys of the config ignored, as asked: {', '.join(keys)}; figures are wrong if that changes what a model computes")
        yield


def _reading(options: dict[str, Any]) -> Reading:
    from ..evaluation.measure import Reading

    settings = {"dtype": options["dtype"], **({"memory_gb": options["memory_gb"]} if options["memory_gb"] else {})}
    chosen = {"text": options["text"], "positions": options["positions"], "length": options["window"]}
    return Reading(**chosen, settings=settings, students={"kv": options.get("kv", "16")}, cache=options.get("cache"))


def _compared(teacher: str, students: list[str], options: dict[str, Any]) -> Comparison:
    from ..evaluation.measure import compare

    with _ignoring([teacher, *students], options), stages() as shown:
        found = compare(teacher, students, _reading(options), shown.tell)
    _tell(found.notes)
    return found


def _tell(notes: tuple[str, ...]) -> None:
    for note in notes:
        tell(f"note: {note}")


def _text_object(text: Windows) -> dict[str, Any]:
    return {"text": {"name": text.name, "positions": text.positions, "sha256": text.digest}, "version": __version__}


def _without_nan(found: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities, which JSON does not have, by null."""
    return json.loads(json.dumps(found), parse_constant=lambda _: None)  # type: ignore[no-any-return]


def _text_line(text: Windows) -> str:
    return f"{text.positions:,} positions in {counted(len(text.windows), 'window')}: {text.name}"


def _size_text(found: Figures) -> str:
    return f"{human_bytes(found.nbytes)}, {found.bpw:.2f} bits per weight"


def _plus_minus(value: float, stderr: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" + ("" if stderr is None or math.isnan(stderr) else f" ± {stderr:.{digits}f}")


def _share_text(value: float, stderr: float | None, sign: str = "") -> str:
    return f"{value:{sign}.1%}" + ("" if stderr is None or math.isnan(stderr) else f" ± {stderr:.1%}")


def _kl_text(value: float | None, stderr: float | None) -> str:
    """Format a KL divergence with four decimals, or two significant digits if small."""
    value = value or 0.0
    if value >= 0.005:
        return _plus_minus(value, stderr, 4)
    return f"{value:.2g}" + ("" if not stderr else f" ± {stderr:.1g}")


def _show_comparison(found: Comparison, as_json: bool) -> None:
    if as_json:
        everything = {"teacher": asdict(found.teacher), "models": [asdict(each) for each in found.students]}
        click.echo(
            json.dumps(
                _without_nan({**everything, "differences": [asdict(each) for each in found.differences], **_text_object(found.text)})
            )
        )
        return
    _heading(found)
    _table(found.students)
    click.echo("\n".join(_difference_line(each) for each in found.differences), nl=bool(found.differences))


def _heading(found: Comparison) -> None:
    teacher = found.teacher
    click.echo(f"teacher {teacher.model}: {_size_text(teacher)}, perplexity {_plus_minus(teacher.ppl, teacher.ppl_stderr, 2)}")
    click.echo(_text_line(found.text))


def _kl_lines(found: Figures) -> list[str]:
    from ..evaluation.verdict import verdict

    return [
        f"{found.model}: {_size_text(found)}",
        f"KL divergence     {_kl_text(found.kl_mean, found.kl_stderr)} nats; 99 % below {found.kl_p99:.3g}",
        f"same top token    {_share_text(found.top1 or 0.0, found.top1_stderr)}",
        f"perplexity        {found.ppl:.2f}, x{_plus_minus(found.ppl_ratio or 0.0, found.ppl_ratio_stderr, 3)} the teacher's",
        verdict(found.kl_mean or 0.0, found.top1 or 0.0),
    ]


def _table(students: tuple[Figures, ...]) -> None:
    rows: list[tuple[str, ...]] = [("", "bits/weight", "size", "KL", "99 % below", "same top", "perplexity")]
    for each in students:
        ratio = f"x{_plus_minus(each.ppl_ratio or 0.0, each.ppl_ratio_stderr, 3)}"
        kl = _kl_text(each.kl_mean, each.kl_stderr)
        rows.append((each.model, f"{each.bpw:.2f}", human_bytes(each.nbytes), kl, f"{each.kl_p99:.3g}", f"{each.top1:.1%}", ratio))
    _echo_columns(rows)


def _kv_table(found: KVEvaluation) -> None:
    rows: list[tuple[str, ...]] = [("all layers", "KL", "99 % below", "same top")]
    rows += [(f"kv {each.kv}", *_kv_cells(each)) for each in found.formats]
    if found.layers:
        rows.append(("one layer", "", "", ""))
        rows += [(f"layer {each.layer}, {_kv_name(each.kv)}", *_kv_cells(each)) for each in found.layers]
    _echo_columns(rows)


def _kv_cells(each: KVLoss) -> tuple[str, str, str]:
    return _kl_text(each.kl_mean, each.kl_stderr), f"{each.kl_p99:.2g}", f"{each.top1:.1%}"


def _kv_name(kv: str) -> str:
    keys, _, values = kv.removeprefix("k").partition("v")
    return f"values in {values}" if keys == "16" else f"keys in {keys}"


def _echo_columns(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        click.echo("  ".join(cells).rstrip())


def _difference_line(each: Difference) -> str:
    sign = "+" if each.kl_mean >= 0 else "-"
    top1 = _share_text(each.top1, each.top1_stderr, "+")
    return f"{each.model} against {each.against}: KL {sign}{_kl_text(abs(each.kl_mean), each.kl_stderr)}, same top token {top1}"
