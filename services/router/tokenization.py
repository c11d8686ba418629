"""Text to token ids. The router has no model: tokenizers come from the workers, by digest, and are checked against it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from kvrelay import hashing
from kvrelay.errors import EmptyPromptError, InternalError, InvalidChatError, KvRelayError, NoWorkerError, WorkerLostError
from kvrelay.values import ChatMessage
from services.router.fleet import Revision
from services.router.validation import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from services.runtime.offloop import assert_off_loop, run_off_loop
from services.runtime.ports import WorkerInfo, WorkersPort

log = logging.getLogger(__name__)

MAX_TOKENIZERS = 8
"""Loaded at a time; the least recently used goes first."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as workers and placement need it."""

    token_ids: Sequence[int]
    block_hashes: Sequence[bytes]
    """Chained hashes of the full blocks."""


class ModelTokenizer:
    """One tokenizer with its chat template. Everything here computes: call it off the event loop."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Raises `InternalError` for files no tokenizer can be made of."""
        assert_off_loop("loading a tokenizer")
        try:
            self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
            config = json.loads(files.get("tokenizer_config.json", b"{}"))
            template = files["chat_template.jinja"].decode() if "chat_template.jinja" in files else _template_in(config)
            self._template = None if template is None else _environment().from_string(template)
        # The library raises plain `Exception` for a file it cannot read.
        except Exception as error:
            raise InternalError(f"a worker's tokenizer cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}

    def encode_text(self, text: str) -> list[int]:
        """As the tokenizer says, its special tokens included."""
        assert_off_loop("tokenising")
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
        return ids

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Through the model's template, up to where the assistant's turn begins. Raises `InvalidChatError` in the template's words."""
        # A template writes the special tokens itself.
        ids: list[int] = self._tokenizer.encode(self.render(messages), add_special_tokens=self._template is None).ids
        return ids

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The conversation as text; without a template a line a message, roles as they come."""
        assert_off_loop("rendering a chat template")
        if self._template is None:
            return "".join(f"{message.role}: {message.content}\n" for message in messages) + "assistant:"
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, tools=None, documents=None, **self._special)
        # A template can fail in any way Python can, and it fails on what the client sent.
        except Exception as error:
            raise InvalidChatError(f"the model's chat template refuses the conversation: {error}", field="chat") from error


class Tokenizers:
    """Tokenizers by digest, each fetched once however many requests ask for it at the same time."""

    def __init__(self, workers: WorkersPort, *, fetch_timeout_s: float = 30.0) -> None:
        self._workers = workers
        self._fetch_timeout_s = fetch_timeout_s
        self._loaded: OrderedDict[str, ModelTokenizer] = OrderedDict()
        self._fetching: dict[str, asyncio.Lock] = {}

    async def encode(self, prompt: Prompt, revision: Revision, sources: Sequence[WorkerInfo], salt: str) -> EncodedPrompt:
        """Ids and block hashes. Raises `EmptyPromptError`, `InvalidChatError`, or why the tokenizer could not be had."""
        match prompt:
            case TextPrompt(text):
                tokenizer = await self.get(revision.tokenizer_digest, sources)
                return await run_off_loop(lambda: _hashed(tokenizer.encode_text(text), revision, salt))
            case ChatPrompt(messages):
                tokenizer = await self.get(revision.tokenizer_digest, sources)
                return await run_off_loop(lambda: _hashed(tokenizer.encode_chat(messages), revision, salt))
            case TokenPrompt(ids):
                return await run_off_loop(_hashed, ids, revision, salt)

    async def get(self, digest: str, sources: Sequence[WorkerInfo]) -> ModelTokenizer:
        """Waits for a fetch under way instead of starting another; a waiter takes over when the fetching request is cancelled."""
        if digest not in self._loaded:
            async with self._fetching.setdefault(digest, asyncio.Lock()):
                if digest not in self._loaded:
                    self._loaded[digest] = await self._fetch(digest, sources)
        tokenizer = self._loaded[digest]
        self._loaded.move_to_end(digest)
        while len(self._loaded) > MAX_TOKENIZERS:
            gone, _ = self._loaded.popitem(last=False)
            self._fetching.pop(gone, None)
        return tokenizer

    async def warm(self, wanted: Mapping[str, Sequence[WorkerInfo]]) -> None:
        """Fetches what is missing of `wanted` (digest to workers that have it), as far as there is room. Never raises for a worker."""
        for digest, sources in wanted.items():
            if digest not in self._loaded and len(self._loaded) < MAX_TOKENIZERS:
                try:
                    await self.get(digest, sources)
                except KvRelayError as error:
                    log.info("tokenizer %s is not to be had yet: %s", digest, error.message)

    async def _fetch(self, digest: str, sources: Sequence[WorkerInfo]) -> ModelTokenizer:
        """From the first worker that gives files of that digest."""
        failure: KvRelayError = NoWorkerError("no worker is ready to give the model's tokenizer", role="decode")
        for worker in sources:
            try:
                async with asyncio.timeout(self._fetch_timeout_s):
                    files = await self._workers.tokenizer_files(worker, digest, timeout_s=self._fetch_timeout_s)
                    return await run_off_loop(_checked, files, digest, worker.worker_id)
            except TimeoutError:
                failure = WorkerLostError(f"worker {worker.worker_id} did not send its tokenizer in time", worker=worker.worker_id)
            except KvRelayError as error:
                failure = error
        raise failure


def _checked(files: Mapping[str, bytes], digest: str, worker_id: str) -> ModelTokenizer:
    assert_off_loop("hashing a tokenizer")
    actual = hashing.tokenizer_digest(files)
    if actual != digest:
        raise InternalError(f"worker {worker_id} sent a tokenizer of digest {actual} for {digest}")
    return ModelTokenizer(files)


def _hashed(token_ids: Sequence[int], revision: Revision, salt: str) -> EncodedPrompt:
    assert_off_loop("hashing a prompt")
    if not token_ids:
        raise EmptyPromptError("the prompt holds no token", field="prompt")
    root = hashing.root_hash(revision.fingerprint, salt)
    token_ids = tuple(token_ids)
    return EncodedPrompt(token_ids, hashing.block_hashes(root, token_ids, revision.layout.block_size))


def _template_in(config: Mapping[str, Any]) -> str | None:
    """Older files hold the template as text, or several by name."""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _token_text(token: object) -> str:
    """A special token in tokenizer_config.json is text or an object with it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _environment() -> ImmutableSandboxedEnvironment:
    """As `transformers` renders: the same whitespace rules and helpers, and no way out of the sandbox."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = tojson
    return environment
