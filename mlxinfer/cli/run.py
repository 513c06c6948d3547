"""Answer one prompt: the answer goes to standard output, everything else to standard error."""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..config import MAX_NUM_SEQS
from ..errors import ImageError, PromptError
from ..types import Completion, EngineStats, SamplingParams, Usage
from .common.answer_json import as_object
from .common.console import LOOPED, as_text, experts_line, logprob_table, printable, tell, text_of_file, usage_line
from .common.default_model import default_model, model_and_prompt
from .common.model_command import ModelCommand
from .common.options import (
    chosen_sampling,
    complete_model,
    engine_options,
    one_sequence_options,
    own_adapter,
    sampling,
    sampling_options,
    server_options,
    split,
    system_option,
)
from .common.pictures import STDIN, PictureFile, is_picture, picture_note, read_pictures, with_names
from .common.schemas import schema_options
from .common.waiting import Progress, reading
from .remote.choice import reached
from .remote.remote_model import RemoteModel
from .repl.attachments import file_block, named_pictures, with_files

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from ..structure import Schema
    from .common.answers import AnswerScreen
    from .repl.kept_run import KeptRun

_PATIENCE_S = 2.0


_EXAMPLES = """\b
Examples:
  mlxinfer run smollm2 "What is the capital of France?"
  git diff | mlxinfer run smollm2 "Explain this change:" -q > notes.md
  mlxinfer run smollm2 "Sum up @notes.md" -s "Be brief." -t 0 --stats
  mlxinfer run smollm2 "Sum up" -f report.txt -f notes.md
  mlxinfer run smollm2 "Invent a dog." --schema 'name, age int, bio: one sentence'
  mlxinfer run smollm2 --batch prompts.jsonl > answers.jsonl
  mlxinfer run -c "And in French?"
  mlxinfer run ~/models/SmolVLM-256M "What is in this picture?" --image photo.jpg"""


@click.command(short_help="Answer one prompt.", cls=ModelCommand, epilog=_EXAMPLES)
@click.argument("model", required=False, shell_complete=complete_model)
@click.argument("prompt", required=False)
@system_option
@click.option(
    "--file",
    "-f",
    "files",
    multiple=True,
    type=click.Path(),
    metavar="FILE",
    help="Add the text of FILE to the prompt, or the picture; repeatable.",
)
@click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(),
    metavar="FILE",
    help="Show the picture in FILE to the model; repeatable. - is standard input.",
)
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@schema_options
@click.option("--continue", "-c", "resume", is_flag=True, help="Continue the last conversation, with its model unless MODEL is given.")
@click.option("--keep/--no-keep", default=None, help="Keep prompt and answer for --continue.  [default: on a terminal]")
@click.option(
    "--batch",
    type=click.Path(),
    metavar="FILE",
    help="Answer the prompts in a file of JSON lines together, and print JSON lines; - is standard input.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option("--stats", is_flag=True, help="Print tokens, speed and memory on standard error, after the answer.")
@click.option("--quiet", "-q", is_flag=True, help="Print the answer alone: no notes, and no progress.")
@sampling_options
@click.option("--n", type=int, help="Answers to the same prompt.")
@click.option("--logprobs", type=int, metavar="K", help="Log-probabilities of each token and of the K likeliest.")
@server_options
@one_sequence_options
@engine_options
def run(model: str | None, prompt: str | None, batch: str | None, **options: Any) -> None:
    """Answer PROMPT, and whatever comes on standard input, with MODEL.

    The model's chat template is applied if it has one. @FILE in PROMPT adds the file's text, or the picture, as -f does. A file
    without PROMPT is the prompt. The answer alone goes to standard output. Without MODEL, the largest one here that fits answers, and
    PROMPT has several words. With -c, one argument is PROMPT.

    A line of --batch FILE is a text in quotes, or an object with prompt or messages, and with custom_id, system and sampling if they
    differ, such as max_tokens; OpenAI's batches work too.
    """
    if batch is None:
        _answer(model, prompt, **options)
    else:
        click.get_current_context().exit(_answer_batch(model, prompt, batch, **options))


def _answer(
    model: str | None,
    prompt: str | None,
    *,
    system: str | None,
    files: tuple[str, ...],
    images: tuple[str, ...],
    raw: bool,
    schema: Schema | None,
    schema_multi: Schema | None,
    resume: bool,
    keep: bool | None,
    as_json: bool,
    quiet: bool,
    stats: bool,
    **options: Any,
) -> None:
    from .repl.kept_run import kept_run

    (model, prompt), (model_settings, given) = model_and_prompt(model, prompt, continues=resume), split(options)
    text, pictures = _read_prompt(prompt, files, images, quiet=quiet)
    given |= {"adapter": own_adapter(model_settings), "structure": schema or schema_multi}
    params = sampling(given)
    if click.get_current_context().get_parameter_source("max_num_seqs") is ParameterSource.DEFAULT:
        model_settings["max_num_seqs"] = min(params.n, MAX_NUM_SEQS)
    talk = kept_run(resume, keep, chosen_sampling(given))
    model = model or talk.before.source or default_model(quiet=quiet)
    with reached(model, model_settings, quiet=quiet) as llm:
        asked, params = _prompt(llm, talk, text, system, raw, _noted(llm, pictures, quiet=quiet)), sampling(given, llm.default_params)
        answers = _print_object(llm, asked, params) if as_json else _print_answers(llm, asked, params, quiet=quiet, stats=stats)
        if not raw and llm.tokenizer.chat_template is not None:
            talk.keep(llm, model, (text, system, pictures), answers)


def _answer_batch(
    model: str | None,
    prompt: str | None,
    batch: str,
    *,
    system: str | None,
    raw: bool,
    schema: Schema | None,
    schema_multi: Schema | None,
    quiet: bool,
    **options: Any,
) -> int:
    from .common.batch import answer_batch, read_batch

    for name, flag in (("files", "-f"), ("images", "--image"), ("resume", "-c")):
        if options.pop(name):
            raise click.UsageError(f"{flag} does not go with --batch")
    if prompt is not None:
        raise click.UsageError("--batch FILE has the prompts: leave PROMPT out")
    model_settings, given = split({name: value for name, value in options.items() if name not in ("keep", "as_json", "stats")})
    given |= {"adapter": own_adapter(model_settings), "structure": schema or schema_multi}
    sampling(given)
    lines = read_batch(batch, system, raw=raw)
    if click.get_current_context().get_parameter_source("max_num_seqs") is ParameterSource.DEFAULT:
        model_settings["max_num_seqs"] = min(len(lines), MAX_NUM_SEQS)
    with reached(model or default_model(quiet=quiet), model_settings, quiet=quiet) as llm:
        return answer_batch(llm, lines, sampling(given, llm.default_params), quiet=quiet)


def _read_prompt(
    argument: str | None, files: Sequence[str], images: Sequence[str], *, quiet: bool = False
) -> tuple[str, list[PictureFile]]:
    """Return the prompt and its pictures: those of `images` and `files`, then those that the argument names.

    The text is the argument with the files that it names and `files`, followed by standard input, unless that is a picture. A single file
    without an argument is the prompt. "-" or no argument reads a terminal too.
    """
    paths = [Path(name).expanduser() for name in files if name != STDIN]
    shown = [str(path) for path in paths if is_picture(path)]
    pictures = read_pictures([*images, *shown, *map(str, named_pictures(argument or ""))])
    typed, told = _typed(argument, [path for path in paths if not is_picture(path)])
    piped = ""
    if STDIN not in images and (typed is None or not sys.stdin.isatty()):
        _tell_if_it_waits()
        piped = as_text(sys.stdin.buffer.read(), "standard input").strip("\r\n")
    text = "\n\n".join(part for part in (typed, piped) if part)
    if not text.strip():
        raise PromptError("the prompt is empty: give it as an argument, in a file (-f), or on standard input")
    for note in () if quiet else told:
        tell(f"with {note}")
    return text, pictures


def _typed(argument: str | None, paths: list[Path]) -> tuple[str | None, list[str]]:
    """Return the text of the argument and the files, and a note per file; None if the text must come from standard input."""
    argument = None if argument == "-" else argument
    if argument is None and len(paths) == 1:
        return text_of_file(paths[0]).strip("\r\n"), []
    typed, told = ("", []) if argument is None else with_files(argument)
    added = [file_block(path) for path in paths]
    parts = [typed, *(block for block, _ in added)]
    return None if argument is None and not added else "\n\n".join(filter(None, parts)), [*told, *(note for _, note in added)]


def _noted(llm: LLM | RemoteModel, pictures: list[PictureFile], *, quiet: bool) -> list[PictureFile]:
    """Print the size and tokens of each picture, and return them. Raises `ImageError` that names the file."""
    for note in [picture_note(llm, picture) for picture in pictures]:
        if not quiet:
            tell(note)
    return pictures


def _tell_if_it_waits() -> None:
    try:
        waits = not select.select([sys.stdin], [], [], 0 if sys.stdin.isatty() else _PATIENCE_S)[0]
    except (OSError, ValueError):
        return
    if waits:
        tell("reading standard input (Ctrl-D ends it, < /dev/null skips it)")


def _prompt(llm: LLM | RemoteModel, talk: KeptRun, text: str, system: str | None, raw: bool, pictures: Sequence[PictureFile]) -> Any:
    templated = not raw and llm.tokenizer.chat_template is not None
    if not templated:
        if system is not None or talk.before.turns:
            raise PromptError(f"{'--continue' if system is None else '--system'} needs a chat template, and none is in use here")
        if not pictures:
            return llm.tokenizer.encode(text)
        if isinstance(llm, RemoteModel):
            raise PromptError("--raw with pictures needs its own copy of the model: add --local")
        return {"prompt": text, "images": [picture.data for picture in pictures]}
    try:
        return llm.chat_prompt(talk.messages(text, system), images=[picture.data for picture in pictures])
    except ImageError as error:
        raise ImageError(with_names(str(error), pictures)) from None


def _print_answers(llm: LLM | RemoteModel, prompt: Any, params: SamplingParams, *, quiet: bool, stats: bool) -> list[Completion]:
    """Stream one answer, or print several finished ones, each below its number. Then print the notes."""
    from .common.answers import AnswerScreen

    screen = AnswerScreen(Progress(partial(reading, llm)), quiet=quiet)
    answers = _printed(llm, prompt, params, screen)
    _report(answers, params, llm.max_context, quiet=quiet, stats=stats)
    if stats and (totals := _totals(llm)) and (line := experts_line(totals)):
        tell(line)
    return answers


def _totals(llm: LLM | RemoteModel) -> EngineStats | None:
    """Return the statistics of a model in this process."""
    return None if isinstance(llm, RemoteModel) else llm.stats()


def _printed(llm: LLM | RemoteModel, prompt: Any, params: SamplingParams, screen: AnswerScreen) -> list[Completion]:
    if params.n > 1:
        with screen.waiting():
            completions = llm.generate([prompt], params)
        click.echo("\n".join(f"--- {c.index + 1} of {params.n} ---\n{_shown(c.text)}" for c in completions))
        return completions
    chunks = []
    with closing(llm.stream(prompt, params)) as stream, screen.waiting():
        for chunk in stream:
            chunks.append(chunk)
            screen.show(chunk)
    screen.close()
    text, reasoning = "".join(chunk.text for chunk in chunks), "".join(chunk.reasoning or "" for chunk in chunks)
    logprobs, last = [each for chunk in chunks for each in chunk.logprobs or []], chunks[-1]
    return [Completion(text, [], last.finish_reason or "stop", last.usage or Usage(0, 0), logprobs, reasoning=reasoning or None)]


def _shown(text: str) -> str:
    return printable(text) if sys.stdout.isatty() else text


def _report(completions: list[Completion], params: SamplingParams, context: int, *, quiet: bool, stats: bool) -> None:
    for completion in completions:
        if params.logprobs is not None and completion.logprobs:
            click.echo(logprob_table(completion.logprobs), err=True)
    if stats:
        tell(usage_line(_total([completion.usage for completion in completions])))
    if quiet:
        return
    if any(completion.finish_reason == "loop" for completion in completions):
        tell(f"stopped: {LOOPED} (--no-stop-on-loop lets it run)")
    cut = [completion.usage for completion in completions if completion.finish_reason == "length"]
    if cut:
        full = any(usage.total_tokens >= context for usage in cut)
        tell(f"stopped for length: {f'the context of {context} tokens is full' if full else f'--max-tokens is {params.max_tokens}'}")


def _total(usages: list[Usage]) -> Usage:
    """Return the total usage of several answers to one prompt; the prompt counts once."""
    first, last = usages[0], max(usage.ttft_s + usage.stats.decode_s for usage in usages)
    tokens = sum(usage.completion_tokens for usage in usages)
    seconds = last - first.ttft_s
    stats = replace(
        first.stats,
        drafted_tokens=sum(usage.stats.drafted_tokens for usage in usages),
        accepted_tokens=sum(usage.stats.accepted_tokens for usage in usages),
    )
    rate = (tokens - len(usages)) / seconds if len(usages) > 1 and seconds > 0 else first.decode_tps
    return replace(first, completion_tokens=tokens, decode_tps=rate, stats=stats)


def _print_object(llm: LLM | RemoteModel, prompt: Any, params: SamplingParams) -> list[Completion]:
    answers = llm.generate([prompt], params)
    click.echo(json.dumps(as_object(answers, _totals(llm)), ensure_ascii=False))
    return answers
