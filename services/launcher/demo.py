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
from services.runtime.config import load_settings, setting
from services.runtime.otlp_receiver import OtlpReceiver

DOCUMENT = Path(__file__).with_name("document.txt")
TRACE_TIMEOUT_S = 10.0
KEEP_SHARE = 0.9
"""Of a document that is too long, what a try keeps of what the try before had."""
MAX_CUTS = 60

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the demo asks, and of which model."""

    model: str = setting("smollm2", "model folder (Hugging Face style), hub name, or 'smollm2' for the demo model")
    short_question: str = setting("What is a lighthouse for? Answer in one sentence.", "answered on one worker")
    document: str = setting("", "text file that the other questions are about; empty: a harbour's logbook that comes with the suite")
    question: str = setting("What is the name of the lighthouse keeper's dog?", "about the document: its KV is handed over")
    second_question: str = setting("What did the mail boat bring on 2 October?", "about the document again: its prefix is cached")
    max_tokens: int = setting(40, "length of an answer at most", unit="tokens", minimum=1)
    split_threshold_tokens: int = setting(256, "uncached prompt tokens from which a request is split", unit="tokens", minimum=0)
    dtype: str = setting("bfloat16", "dtype of weights, arithmetic and KV", choices=("bfloat16", "float32"))
    width: int = setting(110, "columns of the waterfall", unit="columns", minimum=60)


async def run(settings: DemoSettings, environ: Mapping[str, str], say: Say, show: Say) -> None:
    """Raises `StartError` or a `KvRelayError` when something does not work; everything has stopped then too.

    `say` takes whole lines, `show` pieces of text as they stream in.
    """
    document = read_document(settings.document)
    begun = time.monotonic()
    async with OtlpReceiver() as receiver:
        suite_settings = SuiteSettings(
            model=settings.model,
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
                shorter = cut(document)
                limit = error.fields.get("limit_tokens", "?")
                self._say(f"  (too long for the context of {limit} tokens: cut from {len(document):,} to {len(shorter):,} characters)")
                document = shorter
        else:
            raise ConfigError("the document is far too long for the model's context")
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


def read_document(name: str) -> str:
    """The named file's text, or that of the suite's own document; `ConfigError` for a file that cannot be read or holds nothing."""
    path = Path(name).expanduser() if name else DOCUMENT
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the document {path}: {error.strerror}") from None
    if not text:
        raise ConfigError(f"the document {path} is empty")
    return text


def cut(document: str) -> str:
    """The document's beginning, up to the end of a word."""
    return document[: int(len(document) * KEEP_SHARE)].rsplit(None, 1)[0]


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
