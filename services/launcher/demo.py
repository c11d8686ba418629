"""`make demo`: a whole suite answers a short question, then two about a long document, and shows where the time went.

python -m services.launcher.demo --document FILE --question "..."
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import kvrelay
from kvrelay.errors import ConfigError, InvalidMaxTokensError, KvRelayError, PromptTooLongError
from services.launcher import waterfall
from services.launcher.errors import StartError
from services.launcher.settings import SuiteSettings
from services.launcher.suite import RunningSuite, running_suite
from services.runtime.processes.settings import load_settings, setting
from services.runtime.telemetry.otlp_receiver import OtlpReceiver

DOCUMENT = Path(__file__).with_name("document.txt")
TRACE_TIMEOUT_S = 10.0
FIT_SHARE = 0.8
"""Of what would just fit a context, how much is kept: tokens are not spread evenly over a text, and an answer needs room too."""
MAX_CUTS = 8
MAX_DOCUMENT_CHARS = 1_000_000
"""Their UTF-8 fits the router's largest request, whatever they are."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the demo asks, and of which model."""

    model: str = setting("smollm2", "model folder (Hugging Face style), hub name, or 'smollm2' for the demo model")
    cache_dir: str = setting("~/.cache/kvrelay", "where converted models are kept", env="KVRELAY_CACHE")
    short_question: str = setting("What is a lighthouse for? Answer in one sentence.", "answered on one worker")
    document: str = setting("", "text file that the other questions are about; empty: a harbour's logbook that comes with the suite")
    document_chars: int = setting(
        6000,
        "how much of the document is asked about, from its beginning; more takes longer",
        unit="characters",
        minimum=1,
        maximum=MAX_DOCUMENT_CHARS,
    )
    question: str = setting("What is the name of the lighthouse keeper's dog?", "about the document: its KV is handed over")
    second_question: str = setting("What did the mail boat bring on 2 October?", "about the document again: its prefix is cached")
    max_tokens: int = setting(40, "length of an answer at most", unit="tokens", minimum=1)
    split_threshold_tokens: int = setting(256, "uncached prompt tokens from which a request is split", unit="tokens", minimum=0)
    dtype: str = setting("bfloat16", "dtype of the weights", choices=("bfloat16", "float32"))
    width: int = setting(110, "columns of the waterfall", unit="columns", minimum=60)


async def run(settings: DemoSettings, environ: Mapping[str, str], say: Say, show: Say) -> None:
    """Raises `StartError` or a `KvRelayError` when something does not work; everything has stopped then too.

    `say` takes whole lines, `show` pieces of text as they stream in.
    """
    document = read_document(settings.document, settings.document_chars, say)
    begun = time.monotonic()
    async with OtlpReceiver() as receiver:
        suite_settings = SuiteSettings(
            model=settings.model,
            cache_dir=settings.cache_dir,
            dtype=settings.dtype,
            port=0,
            split_threshold_tokens=settings.split_threshold_tokens,
            otlp_endpoint=receiver.endpoint,
            max_restarts=0,
        )
        say("starting Redis, a KV store, a prefill worker, a decode worker and the router")
        async with running_suite(suite_settings, environ, say) as suite:
            say(f"serving {suite.model_name} at {suite.address}, ready after {time.monotonic() - begun:.1f} s")
            try:
                await _ask_all(settings, document, suite, receiver, say, show)
            except (KvRelayError, StartError) as error:
                raise StartError(error.message, _tails(suite)) from error
    say(f"\neverything has stopped; the demo took {time.monotonic() - begun:.1f} s")


async def _ask_all(settings: DemoSettings, document: str, suite: RunningSuite, receiver: OtlpReceiver, say: Say, show: Say) -> None:
    async with kvrelay.AsyncClient(suite.address) as client:
        asker = Asker(client, receiver, settings, say, show)
        await asker.ask("A short question: both phases on one worker", "", settings.short_question)
        document = await asker.ask(
            "A question about a long document: prefill on one worker, decode on another", document, settings.question
        )
        await asker.ask("Another question about the same document: its KV is there already", document, settings.second_question)


class Asker:
    """Asks one question at a time and draws what its spans tell."""

    def __init__(self, client: kvrelay.AsyncClient, receiver: OtlpReceiver, settings: DemoSettings, say: Say, show: Say) -> None:
        self._client = client
        self._receiver = receiver
        self._settings = settings
        self._say = say
        self._show = show

    async def ask(self, title: str, document: str, question: str) -> str:
        """Streams the answer, then its waterfall. Returns the document as far as it fitted the model's context."""
        self._say(f"\n=== {title}\n\n> {question}")
        for _ in range(MAX_CUTS):
            try:
                stream = await self._answer(document, question)
                break
            except (PromptTooLongError, InvalidMaxTokensError) as error:
                if not document:
                    raise
                shorter = cut(document, int(len(document) * FIT_SHARE * fitting_share(error)))
                self._say(f"  (too long for the model's context: cut from {len(document):,} to {len(shorter):,} characters)")
                document = shorter
        else:
            raise ConfigError("the document does not fit the model's context")
        await self._draw(stream)
        return document

    async def _answer(self, document: str, question: str) -> kvrelay.GenerationStream:
        text = f"{document}\n\nQuestion: {question}" if document else question
        messages = [kvrelay.ChatMessage("user", text)]
        async with self._client.generate(messages=messages, max_tokens=self._settings.max_tokens) as stream:
            async for token in stream:
                self._show(token.text)
        self._show("\n\n")
        return stream

    async def _draw(self, stream: kvrelay.GenerationStream) -> None:
        completion = stream.completion
        assert completion is not None
        try:
            spans = await self._receiver.wait_for_trace(completion.trace_id, waterfall.is_complete, TRACE_TIMEOUT_S)
        except TimeoutError as error:
            raise StartError(str(error)) from None
        drawn = waterfall.build(spans)
        wrong = waterfall.disagreements(drawn, completion.timings)
        self._say(waterfall.render(drawn, disagreements=wrong, width=self._settings.width))
        if wrong:
            raise StartError("the phases of a request do not add up: " + "; ".join(wrong))


def read_document(name: str, chars: int, say: Say) -> str:
    """The beginning of the named file's text, or of the suite's own document; `ConfigError` for a file that is no text, or none at all."""
    path = Path(name).expanduser() if name else DOCUMENT
    try:
        with path.open(encoding="utf-8") as file:
            read, size = file.read(chars + 1), path.stat().st_size
    except OSError as error:
        raise ConfigError(f"cannot read the document {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the document {path} is not UTF-8 text") from None
    text = read.strip()
    if "\0" in text:
        raise ConfigError(f"the document {path} is not text")
    if not text:
        raise ConfigError(f"the document {path} is empty")
    if len(read) > chars:
        text = cut(text, chars)
        say(f"of the document's {size:,} bytes the questions are about the first {len(text):,} characters (--document-chars N for more)")
    return text


def fitting_share(error: KvRelayError) -> float:
    """How much of a prompt that was too long would fit; 1 when all of it does, and only the answer lacks room."""
    if isinstance(error, PromptTooLongError):
        return float(error.fields["limit_tokens"]) / float(error.fields["prompt_tokens"])
    return 1.0


def cut(document: str, chars: int) -> str:
    """The document's first `chars` characters (one at least), without the last word where there are several: it may be half a word."""
    return document[: max(1, chars)].rsplit(None, 1)[0]


def _tails(suite: RunningSuite) -> str:
    supervisor = suite.supervisor
    return "".join(f"--- end of the log of {name}\n{supervisor.child(name).tail()}" for name in supervisor.names)


def main(argv: list[str], environ: Mapping[str, str]) -> int:
    """Exit code 0 when every answer came and added up; 1 with the services' logs, 2 for a wrong option, 130 after Ctrl-C."""
    settings = load_settings(DemoSettings, argv, environ, "python -m services.launcher.demo")

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        asyncio.run(run(settings, environ, lambda line: show(line + "\n"), show))
    except ConfigError as error:
        sys.stderr.write(f"kvrelay demo: {error.message}\n")
        return 2
    except (KvRelayError, StartError) as error:
        sys.stderr.write(f"{getattr(error, 'log_tail', '')}kvrelay demo: {error.message}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ)))
