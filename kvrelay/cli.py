"""`kvrelay generate | chat | status | models | schedule`: the SDK on the command line; `profile` and `doctor` are the suite's own.

Text goes to stdout as it comes, everything else to stderr. Exit status: 0, 1 for an error (`error: REASON: message`), 2 for wrong
usage, 130 after Ctrl-C, 141 when the reader of stdout went away.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from kvrelay import __version__, report, schedule_report, suite_command
from kvrelay.client import DEFAULT_TARGET, DEFAULT_TIMEOUT_S, TARGET_ENV
from kvrelay.errors import InvalidPromptError, KvRelayError
from kvrelay.request import GenerateOptions, Prompt
from kvrelay.sync import Client, SyncGenerationStream
from kvrelay.values import ChatMessage, Token

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in suite_command.MODULES:
        # Before any parsing: its options are the suite's business.
        try:
            suite_command.run(argv[0], argv[1:], os.environ)
        except KvRelayError as error:
            return _report_error(error)
    args = _parser().parse_args(argv)
    if sys.stdout is None:  # as after `>&-`
        print("error: standard output is closed", file=sys.stderr)
        return 1
    # Bytes that are no text become a typed error, text the terminal lacks becomes '?'; neither a traceback.
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except KvRelayError as error:
        return _report_error(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _report_error(error: KvRelayError) -> int:
    if sys.stdout is not None:
        sys.stdout.flush()
    print(f"error: {error.reason}: {error.message}", file=sys.stderr)
    return 1


# --- commands ----------------------------------------------------------------------------------------------------------------


Command = Callable[[Client, argparse.Namespace], int]


def _with_client(command: Command) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        with Client(args.target, timeout=args.timeout) as client:
            return command(client, args)

    return run


def _schedule(args: argparse.Namespace) -> int:
    for line in schedule_report.draw(args.file, args.last):
        print(line)
    return 0


def _generate(client: Client, args: argparse.Namespace) -> int:
    if args.token_ids is not None and (args.chat or args.system):
        args.usage_error("--chat and --system go with PROMPT, not with --token-ids")
    options = _options(args)
    prompt: Prompt | None = args.prompt
    if args.token_ids is None:
        text = _stdin().read() if args.prompt in (None, "-") else args.prompt
        prompt = [*_system(args), ChatMessage("user", text)] if args.chat or args.system else text
    with client.generate(prompt, **options) as stream:
        if args.json:
            _print_json_events(stream)
        else:
            _print_text(stream)
    if args.stats:
        _print_stats(stream)
    return 0


def _chat(client: Client, args: argparse.Namespace) -> int:
    """Ctrl-C ends the answer, not the conversation; an answer that was not finished is forgotten with its question."""
    options = _options(args)
    history = _system(args)
    prompt = "> " if _stdin().isatty() else ""
    while True:
        try:
            question = input(prompt)
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if not question.strip():
            continue
        turn = ChatMessage("user", question)
        try:
            with client.generate([*history, turn], **options) as stream:
                if args.json:
                    _print_json_events(stream)
                else:
                    _print_text(stream)
        except KeyboardInterrupt:
            print("\n(cancelled)", file=sys.stderr)
            continue
        except KvRelayError as error:
            _report_error(error)
            continue
        history += [turn, ChatMessage("assistant", stream.text)]
        if args.stats:
            _print_stats(stream)


def _status(client: Client, args: argparse.Namespace) -> int:
    view = client.fleet()
    print(_json(view) if args.json else report.fleet(view))
    return 0


def _models(client: Client, args: argparse.Namespace) -> int:
    views = client.list_models()
    print(_json(views) if args.json else report.models(views))
    return 0


def _print_text(stream: SyncGenerationStream) -> None:
    written = ""
    try:
        for token in stream:
            sys.stdout.write(token.text)
            sys.stdout.flush()
            written = token.text or written
    finally:
        if written and not written.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()


def _print_json_events(stream: SyncGenerationStream) -> None:
    """One object a line: started, each token, done."""
    if stream.started is not None:
        print(_json({"event": "started", **dataclasses.asdict(stream.started)}, indent=None), flush=True)
    for token in stream:
        print(_json({"event": "token", **_token_fields(token)}, indent=None), flush=True)
    if stream.completion is not None:
        last = {"text": stream.text, "decision": stream.decision, "client_ttft_s": stream.ttft_s}
        print(_json({"event": "done", **dataclasses.asdict(stream.completion), **last}, indent=None), flush=True)


def _token_fields(token: Token) -> dict[str, Any]:
    fields = dataclasses.asdict(token)
    if token.logprob is None:
        del fields["logprob"], fields["top_logprobs"]
    return fields


def _print_stats(stream: SyncGenerationStream) -> None:
    if stream.completion is not None:
        text = report.stats(stream.completion, decision=stream.decision, ttft_s=stream.ttft_s, itl_s=stream.itl_s)
        print(text, file=sys.stderr)


def _json(value: Any, indent: int | None = 2) -> str:
    def default(item: Any) -> Any:
        if isinstance(item, enum.Enum):
            return item.value
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return dataclasses.asdict(item)
        raise TypeError(f"{type(item).__name__} has no JSON form")

    return json.dumps(value, default=default, ensure_ascii=False, indent=indent)


# --- options -----------------------------------------------------------------------------------------------------------------


def _stdin() -> TextIO:
    if sys.stdin is None:  # as after `<&-`
        raise InvalidPromptError("standard input is closed", field="prompt")
    return sys.stdin


def _system(args: argparse.Namespace) -> list[ChatMessage]:
    return [ChatMessage("system", args.system)] if args.system else []


def _options(args: argparse.Namespace) -> GenerateOptions:
    names: Mapping[str, Any] = vars(args)
    options: dict[str, Any] = {name: names[name] for name in GenerateOptions.__annotations__ if names.get(name) is not None}
    options.pop("timeout", None)  # the client's own
    if args.logit_bias is not None:
        options["logit_bias"] = dict(args.logit_bias)
    return options  # type: ignore[return-value]


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKEN_ID=BIAS") from None


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvrelay", description="Client of a kvrelay router.")
    parser.add_argument("--version", action="version", version=f"kvrelay {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--target", help=f"router as host:port; default ${TARGET_ENV} or {DEFAULT_TARGET}")
    common.add_argument(
        "--timeout",
        type=_seconds,
        default=DEFAULT_TIMEOUT_S,
        help="seconds for a request (default %(default)s); inf: the router's own limit",
    )
    common.add_argument("--json", action="store_true", help="machine-readable output")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", parents=[common], help="continue a prompt", description="Streams an answer to stdout.")
    generate.add_argument("prompt", nargs="?", metavar="PROMPT", help="text; '-' or nothing reads stdin")
    generate.add_argument("--token-ids", type=_ids, help="prompt as token ids, separated by commas, instead of PROMPT")
    generate.add_argument("--chat", action="store_true", help="send PROMPT as a user's message through the chat template")
    _add_generation_options(generate)
    generate.set_defaults(run=_with_client(_generate), usage_error=generate.error)

    chat = commands.add_parser("chat", parents=[common], help="talk", description="Ctrl-C ends an answer, Ctrl-D the conversation.")
    _add_generation_options(chat)
    chat.set_defaults(run=_with_client(_chat))

    for name, run, text in (
        ("status", _status, "workers, loads, and pairs that are not formed"),
        ("models", _models, "models that can be asked for"),
    ):
        commands.add_parser(name, parents=[common], help=text, description=f"Shows {text}.").set_defaults(run=_with_client(run))

    schedule = commands.add_parser("schedule", help="draw a worker's steps", description="Draws what --explain-schedule has written.")
    schedule.add_argument("file", type=Path, metavar="FILE", help="what a worker has written")
    schedule.add_argument("--last", type=_count, metavar="N", help="only the last N steps; the summary counts all")
    schedule.set_defaults(run=_schedule)

    for name, text in suite_command.HELP.items():
        commands.add_parser(name, add_help=False, help=text)
    return parser


def _add_generation_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stats", action="store_true", help="usage, path and phase times on stderr afterwards")
    parser.add_argument("--system", help="system message (implies the chat template)")
    parser.add_argument("--model", help="may be left out where the fleet serves one model")
    for name, kind, text in (
        ("max-tokens", int, "tokens to generate at most"),
        ("temperature", float, "0 (default) is greedy"),
        ("top-k", int, "keep the k likeliest tokens; 0: all"),
        ("top-p", float, "keep the likeliest tokens up to this probability"),
        ("min-p", float, "drop tokens less likely than this times the likeliest"),
        ("seed", int, "the same seed draws the same answer"),
        ("repetition-penalty", float, "over 1 discourages tokens of prompt and answer"),
        ("presence-penalty", float, "subtracted once for a token already generated"),
        ("frequency-penalty", float, "subtracted for each time a token was generated"),
        ("min-tokens", int, "end tokens and stop ids cannot be drawn before this many tokens; a stop string still ends the answer"),
        ("logprobs", int, "log probabilities of the n likeliest tokens (with --json)"),
        ("request-id", str, "shown in traces"),
        ("cache-salt", str, "never share a cached prefix with other salts"),
    ):
        parser.add_argument(f"--{name}", type=kind, help=text)
    parser.add_argument("--logit-bias", type=_bias, action="append", metavar="TOKEN_ID=BIAS", help="may be repeated")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    parser.add_argument("--stop-token-id", type=int, action="append", dest="stop_token_ids", metavar="TOKEN_ID", help="may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the model's end tokens")


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return count


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"must be over 0, got {text}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
