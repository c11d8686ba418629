"""Text and conversations to token ids, with tokenizers that come from workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from kvrelay import hashing
from kvrelay.errors import EmptyPromptError, InternalError, InvalidChatError, WorkerLostError
from kvrelay.handle import KvHandle
from kvrelay.values import ChatMessage
from services.router.fleet import Fleet, Revision
from services.router.tokenization import MAX_TOKENIZERS, ModelTokenizer, Tokenizers
from services.router.validation import ChatPrompt, TextPrompt, TokenPrompt
from services.runtime.offloop import run_off_loop
from services.runtime.ports import DecodeEvent, FleetSnapshot, Job, PrefillEvent, WorkerInfo, WorkerSeen
from tests.simulation.router_world import IDENTITY, LAYOUT, worker

NAMES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TALK = (
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "  What is\n\na cat? <|im_end|> ü 🐈 "),
    ChatMessage("assistant", "An animal."),
    ChatMessage("user", "And a dog?"),
)


def files_of(folder: Path, **changes: bytes | None) -> dict[str, bytes]:
    files = {name: (folder / name).read_bytes() for name in NAMES if (folder / name).exists()}
    return {name: content for name, content in {**files, **changes}.items() if content is not None}


def config_with(folder: Path, **changes: object) -> bytes:
    return json.dumps({**json.loads((folder / "tokenizer_config.json").read_bytes()), **changes}).encode()


class Sources:
    """`WorkersPort` that only gives files, or fails."""

    def __init__(self, files: Mapping[str, bytes], *, failures: Mapping[str, Exception] | None = None) -> None:
        self.files = files
        self.failures = failures or {}
        self.asked: list[str] = []
        self.open = asyncio.Event()
        self.open.set()

    async def tokenizer_files(self, worker: WorkerInfo, digest: str, *, timeout_s: float) -> Mapping[str, bytes]:
        self.asked.append(worker.worker_id)
        await self.open.wait()
        if worker.worker_id in self.failures:
            raise self.failures[worker.worker_id]
        return self.files

    def prefill(self, worker: WorkerInfo, job: Job, *, timeout_s: float) -> AsyncGenerator[PrefillEvent, None]:
        raise AssertionError("not asked for here")

    def decode(self, worker: WorkerInfo, job: Job, handle: KvHandle | None, *, timeout_s: float) -> AsyncGenerator[DecodeEvent, None]:
        raise AssertionError("not asked for here")


def revision_of(files: Mapping[str, bytes]) -> Revision:
    return Revision("tiny", b"f" * 32, LAYOUT, hashing.tokenizer_digest(files))


def test_text_and_chat_are_tokenised_as_transformers_does(tiny_model: Path) -> None:
    ours, theirs = ModelTokenizer(files_of(tiny_model)), AutoTokenizer.from_pretrained(tiny_model)
    for text in ("hello", " the cat\n\n and the dog ", "ünïcødé 🐈", "def f(x):\n\treturn x", "<|im_start|>user"):
        assert ours.encode_text(text) == theirs(text)["input_ids"]
    for talk in (TALK, TALK[1:2]):
        turns = [{"role": message.role, "content": message.content} for message in talk]
        assert ours.encode_chat(talk) == theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


def test_special_tokens_that_a_tokenizer_adds_are_added_to_text_and_not_twice_to_chat(tiny_model: Path) -> None:
    raw = json.loads((tiny_model / "tokenizer.json").read_bytes())
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    files = files_of(tiny_model, **{"tokenizer.json": json.dumps(raw).encode()})
    files["tokenizer_config.json"] = config_with(tiny_model, chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    tokenizer = ModelTokenizer(files)
    assert tokenizer.encode_text("a")[0] == 1 and len(tokenizer.encode_text("a")) == 2
    assert tokenizer.encode_chat([ChatMessage("user", "a")]) == [1, tokenizer.encode_text("a")[1], 2]


def test_truncation_and_padding_settings_of_a_file_are_ignored(tiny_model: Path) -> None:
    raw = json.loads((tiny_model / "tokenizer.json").read_bytes())
    raw["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = ModelTokenizer(files_of(tiny_model, **{"tokenizer.json": json.dumps(raw).encode()}))
    assert len(tokenizer.encode_text("zyxwv")) == 5


@pytest.mark.parametrize("where", ["jinja file", "list in the config", "text in the config"])
def test_a_chat_template_is_found_wherever_models_keep_it(tiny_model: Path, where: str) -> None:
    template = "{{ messages[-1]['content'] }}!"
    files = files_of(tiny_model)
    if where == "jinja file":
        files["chat_template.jinja"] = template.encode()
    elif where == "list in the config":
        entries = [{"name": "tools", "template": "no"}, {"name": "default", "template": template}]
        files["tokenizer_config.json"] = config_with(tiny_model, chat_template=entries)
    else:
        files["tokenizer_config.json"] = config_with(tiny_model, chat_template=template)
    assert ModelTokenizer(files).render([ChatMessage("user", "hello")]) == "hello!"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only users') }}",
        "{{ messages.clear() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[7].content }}",
        "{% for n in range(10**9) %}x{% endfor %}",
    ],
)
def test_a_template_that_refuses_or_reaches_out_is_a_chat_error(tiny_model: Path, template: str) -> None:
    tokenizer = ModelTokenizer(files_of(tiny_model, **{"chat_template.jinja": template.encode()}))
    with pytest.raises(InvalidChatError):
        tokenizer.render([ChatMessage("user", "hello")])


def test_a_template_refuses_in_its_own_words(tiny_model: Path) -> None:
    template = "{% if messages[0].role == 'tool' %}{{ raise_exception('Tools speak when they are spoken to.') }}{% endif %}"
    tokenizer = ModelTokenizer(files_of(tiny_model, **{"chat_template.jinja": template.encode()}))
    assert tokenizer.render([ChatMessage("user", "a"), ChatMessage("user", "b"), ChatMessage("tool", "c")]) == ""
    with pytest.raises(InvalidChatError, match="Tools speak when they are spoken to"):
        tokenizer.render([ChatMessage("tool", "c")])


def test_without_a_template_roles_are_written_as_they_come(tiny_model: Path) -> None:
    files = files_of(tiny_model, **{"tokenizer_config.json": config_with(tiny_model, chat_template=None), "chat_template.jinja": None})
    tokenizer = ModelTokenizer(files)
    text = "user: a\nuser: b\ntool: c\nassistant:"
    talk = [ChatMessage("user", "a"), ChatMessage("user", "b"), ChatMessage("tool", "c")]
    assert tokenizer.render(talk) == text
    assert tokenizer.encode_chat(talk) == tokenizer.encode_text(text)


async def test_every_kind_of_prompt_gets_ids_and_chained_hashes(tiny_model: Path) -> None:
    files = files_of(tiny_model)
    revision, book = revision_of(files), Tokenizers(Sources(files))
    tokenizer = await run_off_loop(ModelTokenizer, files)
    text = "the cat and the dog " * 9
    encoded = await book.encode(TextPrompt(text), revision, [worker("decode")], "")
    assert list(encoded.token_ids) == await run_off_loop(tokenizer.encode_text, text)
    root = hashing.root_hash(revision.fingerprint, "")
    assert encoded.block_hashes == await run_off_loop(hashing.block_hashes, root, encoded.token_ids, 16)
    assert (await book.encode(TokenPrompt(encoded.token_ids), revision, [], "")).block_hashes == encoded.block_hashes
    salted = await book.encode(TextPrompt(text), revision, [worker("decode")], "tenant")
    assert not set(salted.block_hashes) & set(encoded.block_hashes)
    chat = await book.encode(ChatPrompt(TALK), revision, [worker("decode")], "")
    assert list(chat.token_ids) == await run_off_loop(tokenizer.encode_chat, TALK)


async def test_a_prompt_without_a_token_is_empty(tiny_model: Path) -> None:
    files = files_of(tiny_model, **{"chat_template.jinja": b"{# says nothing #}"})
    with pytest.raises(EmptyPromptError):
        await Tokenizers(Sources(files)).encode(ChatPrompt(TALK), revision_of(files), [worker("decode")], "")


async def test_many_requests_at_once_fetch_a_tokenizer_once(tiny_model: Path) -> None:
    files = files_of(tiny_model)
    sources = Sources(files)
    sources.open.clear()
    book = Tokenizers(sources)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(book.get(hashing.tokenizer_digest(files), [worker("decode")])) for _ in range(20)]
        await asyncio.sleep(0)
        sources.open.set()
    assert sources.asked == ["decode-0"] and len({task.result() for task in tasks}) == 1


async def test_when_the_fetching_request_is_cancelled_a_waiting_one_fetches(tiny_model: Path) -> None:
    files = files_of(tiny_model)
    sources = Sources(files)
    sources.open.clear()
    book, digest = Tokenizers(sources), hashing.tokenizer_digest(files)
    first, second = (asyncio.create_task(book.get(digest, [worker("decode")])) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    sources.open.set()
    assert isinstance(await second, ModelTokenizer) and len(sources.asked) == 2
    assert first.cancelled()


async def test_the_next_worker_is_asked_when_one_fails_or_lies(tiny_model: Path) -> None:
    files = files_of(tiny_model)
    sources = Sources(files, failures={"decode-0": WorkerLostError("killed")})
    await Tokenizers(sources).get(hashing.tokenizer_digest(files), [worker("decode", 0), worker("decode", 1)])
    assert sources.asked == ["decode-0", "decode-1"]
    with pytest.raises(InternalError, match="sent a tokenizer of digest"):
        await Tokenizers(sources).get("sha256:00", [worker("decode", 1)])
    with pytest.raises(WorkerLostError, match="in time"):
        sources.open.clear()
        await Tokenizers(sources, fetch_timeout_s=0.001).get(hashing.tokenizer_digest(files), [worker("decode", 1)])


async def test_unreadable_files_are_an_error_and_kept_tokenizers_are_bounded(tiny_model: Path) -> None:
    broken = {"tokenizer.json": b"{}"}
    with pytest.raises(InternalError, match="cannot be read"):
        await Tokenizers(Sources(broken)).get(hashing.tokenizer_digest(broken), [worker("decode")])
    sources = Sources({})
    book = Tokenizers(sources)
    for n in range(MAX_TOKENIZERS + 2):
        sources.files = files_of(tiny_model, extra=str(n).encode())
        await book.get(hashing.tokenizer_digest(sources.files), [worker("decode")])
    fetched = len(sources.asked)
    await book.get(hashing.tokenizer_digest(sources.files), [worker("decode")])
    assert len(sources.asked) == fetched
    sources.files = files_of(tiny_model, extra=b"0")
    await book.get(hashing.tokenizer_digest(sources.files), [worker("decode")])
    assert len(sources.asked) == fetched + 1, "the oldest had to go"


async def test_tokenizers_of_new_models_are_fetched_before_anybody_asks(tiny_model: Path) -> None:
    files = files_of(tiny_model)
    sources = Sources(files, failures={"decode-0": WorkerLostError("killed")})
    book, digest = Tokenizers(sources), hashing.tokenizer_digest(files)
    identity = replace(IDENTITY, tokenizer_digest=digest)
    fleet = Fleet()
    fleet.apply(FleetSnapshot([worker("decode", 0, identity=identity)], {}), 0.0)
    await book.warm(fleet.tokenizers())
    assert sources.asked == ["decode-0"], "a failure is the next request's affair"
    fleet.apply(WorkerSeen(worker("prefill", 1, identity=identity)), 0.0)
    fleet.apply(WorkerSeen(worker("prefill", 2, state="draining", identity=identity)), 0.0)
    await book.warm(fleet.tokenizers())
    await book.warm(fleet.tokenizers())
    assert sources.asked == ["decode-0", "decode-0", "prefill-1"]
