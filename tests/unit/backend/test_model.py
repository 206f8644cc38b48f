"""Tokenizer, fingerprint, locks, loading."""

from __future__ import annotations

import copy
import gc
import shutil
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from blending import CHUNKS
from families import build
from tokenizers import processors
from transformers import AutoConfig

from kvrag import (
    BlendConfig,
    BlendEngine,
    ContextWindowError,
    Model,
    ModelLoadError,
    PromptError,
    SettingError,
    UnsupportedModelError,
)
from kvrag.backend.transformers import Tokenizer
from kvrag.backend.transformers.loading import load_config, reader_path
from kvrag.fingerprint import hash_weights
from kvrag.llm import LLMSettings
from kvrag.scheduling.waiting import FairLock
from kvrag.store.values import chunk_key

BOS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def doubling(tokenizer: Any) -> Any:
    """A tokenizer that adds BOS to every text, with a template that also writes it, as in Llama 3."""
    hf = copy.deepcopy(tokenizer)
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    hf.chat_template = BOS_TEMPLATE
    return hf


# ---------------------------------------------------------------- prompts


def test_one_bos_wherever_it_comes_from(doubling: Any) -> None:
    ours = Tokenizer(doubling, "doubling")
    for prompt in ([{"role": "user", "content": "Hello there"}], "Hello there"):
        ids = ours.render(prompt)
        assert ids[0] == 0
        assert ids.count(0) == 1
    assert ours.encode("Hello there").count(0) == 0
    assert ours.preamble[0] == 0
    assert ours.preamble.count(0) == 1


def test_messages_are_rendered_as_transformers_does(tokenizer: Any, model: Model) -> None:
    messages = [{"role": "user", "content": CHUNKS[0]}, {"role": "user", "content": "Who?"}]
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert model.tokenizer.render(messages) == wanted
    assert model.tokenizer.render("<s>Some string") == tokenizer("<s>Some string")["input_ids"]


@pytest.mark.parametrize("token", ["<s>", "</s>", "<pad>"])
def test_control_tokens_in_documents_stay_text(token: str, model: Model, doubling: Any) -> None:
    control = model.tokenizer.hf.convert_tokens_to_ids(token)
    text = f"{CHUNKS[0]} {token} {CHUNKS[1]}"
    for ours in (model.tokenizer, Tokenizer(doubling, "doubling")):
        chunk = ours.encode(text)
        assert control not in chunk
        assert token in ours.decode(chunk)
        ids = ours.render([{"role": "user", "content": text}])
        assert ids.count(control) == (1 if token == "<s>" else 0)
        text_ids = chunk[2:-2]
        assert any(ids[i : i + len(text_ids)] == text_ids for i in range(len(ids))), "found again in the prompt"


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "   \n",
        [],
        [{"role": "user", "content": ""}],
        [{"role": "user"}],
        None,
        3,
        b"bytes",
        ["x", 3],
        ["text"],
        [{"content": "x"}],
        [{"role": 3, "content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
    ],
    ids=repr,
)
def test_invalid_prompts_are_refused(prompt: Any, model: Model) -> None:
    with pytest.raises(PromptError):
        model.tokenizer.render(prompt)


def test_a_prompt_without_tokens_is_empty(tokenizer: Any) -> None:
    class Swallowing:
        chat_template = None
        bos_token_id = None
        backend_tokenizer = tokenizer.backend_tokenizer

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": []}

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return []

    with pytest.raises(PromptError, match="empty"):
        Tokenizer(Swallowing(), "swallowing").render("\u200b")


@pytest.mark.parametrize("bad", ["\ud800", "before \udfff after", CHUNKS[0] + "\udc80"])
def test_lone_surrogates_are_refused_with_a_remedy(bad: str, model: Model) -> None:
    for use in (
        lambda: model.tokenizer.render(bad),
        lambda: model.tokenizer.render([{"role": "user", "content": bad}]),
        lambda: model.tokenizer.render([{"role": "user", "content": [{"type": "text", "text": bad}]}]),
        lambda: model.tokenizer.encode(bad),
    ):
        with pytest.raises(PromptError, match=r"lone surrogate at character \d+.*encode\('utf-8', 'replace'\)"):
            use()


def test_a_template_that_refuses_is_quoted(tokenizer: Any) -> None:
    hf = copy.deepcopy(tokenizer)
    hf.chat_template = "{{ raise_exception('only cats may ask') }}"
    with pytest.raises(PromptError, match="only cats may ask"):
        Tokenizer(hf, "cats").render([{"role": "user", "content": "x"}])
    hf.chat_template = "{{ prompt }}"
    ours = Tokenizer(hf, "cats")
    assert ours.render([{"role": "user", "content": "x"}], prompt="cats") == ours.encode("cats")
    with pytest.raises(PromptError, match="multiple values for argument 'self'"):
        ours.render([{"role": "user", "content": "x"}], **{"self": 1})
    hf.chat_template = None
    with pytest.raises(PromptError, match="no chat template"):
        Tokenizer(hf, "base").render([{"role": "user", "content": "x"}])


def test_the_preamble_is_what_every_prompt_begins_with(model: Model, doubling: Any, tokenizer: Any) -> None:
    for ours in (model.tokenizer, Tokenizer(doubling, "doubling")):
        for content in ("x", "Some longer thing", "123"):
            ids = ours.render([{"role": "user", "content": content}])
            assert tuple(ids[: len(ours.preamble)]) == ours.preamble
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    assert len(Tokenizer(bare, "bare").preamble) == 1


def test_threads_do_not_get_each_others_control_tokens(model: Model) -> None:
    """Whether control tokens are text is state of the tokenizer, and differs between a prompt and a chunk."""
    ours, another = model.tokenizer, Tokenizer(model.tokenizer.hf, "of another model")
    text = "She said </s> and <s> twice. " * 3
    calls: list[Callable[[], list[int]]] = [
        lambda: another.encode(text),
        lambda: ours.render("<s>" + text),
        lambda: ours.render([{"role": "user", "content": text}]),
    ]
    wanted = [call() for call in calls]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(1500):
            if calls[number]() != wanted[number]:
                wrong.append(number)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1, 2, 0, 1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


# ---------------------------------------------------------------- fingerprint


def test_the_fingerprint_changes_with_everything_that_changes_kv(tokenizer: Any, doubling: Any) -> None:
    base = Model(build("llama"), tokenizer).fingerprint
    assert Model(build("llama"), tokenizer, "another name").fingerprint.digest == base.digest
    tuned = build("llama")
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(1e-3 * torch.randn(parameter.shape))
    others = {
        "weights": Model(tuned, tokenizer),
        "dtype": Model(build("llama").bfloat16(), tokenizer),
        "rope": Model(
            build("llama", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), tokenizer
        ),
        "preamble": Model(build("llama"), doubling),
    }
    for name, other in others.items():
        assert other.fingerprint.digest != base.digest
        assert getattr(other.fingerprint, name) != getattr(base, name), name


def test_the_fingerprint_does_not_depend_on_how_the_tokenizer_was_used(tokenizer: Any) -> None:
    hf = copy.deepcopy(tokenizer)
    ours = Tokenizer(hf, "used")
    before = ours.digest
    hf(["a", "b c d e f g"], padding=True, truncation=True, max_length=3)
    assert ours.digest == before
    hf.add_tokens(["a new word"])
    assert ours.digest != before


def test_hash_weights_sees_every_tensor() -> None:
    tensors = {"a": torch.zeros(1000), "b": torch.zeros(3, 4).bfloat16(), "c": torch.zeros(0), "d": torch.tensor(1)}
    base = hash_weights(tensors.items())
    assert hash_weights(tensors.items()) == base
    for name in ("a", "b", "d"):
        changed = tensors | {name: tensors[name] + 1}
        assert hash_weights(changed.items()) != base
    assert hash_weights((tensors | {"a": torch.zeros(10, 100)}).items()) != base
    assert hash_weights({k: tensors[k] for k in "abc"}.items()) != base


def test_chunk_keys(model: Model) -> None:
    key = partial(chunk_key, model.fingerprint.digest)
    assert key([1, 2, 3]) == key((1, 2, 3))
    assert len({key(ids) for ids in ([1, 2, 3], [1, 2], [3, 2, 1], [1, 2, 3, 0], [0x10001], [1, 1])}) == 6


# ---------------------------------------------------------------- the lock


def test_the_lock_is_fair() -> None:
    lock, order = FairLock(), []
    threads = []

    def work(number: int) -> None:
        with lock:
            order.append(number)

    with lock:
        for number in range(6):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            while len(lock._waiting) < number + 1:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == list(range(6))


def test_the_lock_is_released_by_exceptions() -> None:
    lock = FairLock()
    with pytest.raises(ZeroDivisionError), lock:
        raise ZeroDivisionError
    with lock:
        pass


@pytest.fixture
def alarm() -> Iterator[None]:
    """Press Ctrl-C in a moment."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
def test_an_interrupted_wait_leaves_the_lock_usable(alarm: None) -> None:
    lock, holding, leave = FairLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holding.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with lock:
            pass
    leave.set()
    thread.join()
    entered = threading.Event()

    def enter() -> None:
        with lock:
            entered.set()

    threading.Thread(target=enter, daemon=True).start()
    assert entered.wait(60)


# ---------------------------------------------------------------- loading


def test_an_unknown_model_is_named_with_a_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"cannot load model 'no-such/model'.*HF_HUB_OFFLINE is set"):
        Model.from_pretrained("no-such/model")
    with pytest.raises(ModelLoadError, match="check the files in that folder"):
        Model.from_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="there is no such folder"):
        load_config(str(tmp_path / "nothing"))


def test_what_is_read_without_the_model_is_read_from_local_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build("llama").config.save_pretrained(tmp_path)
    calls, read = list[dict[str, Any]](), AutoConfig.from_pretrained

    def from_pretrained(path: str, **options: Any) -> Any:
        calls.append(options)
        return read(path, **options)

    monkeypatch.setattr(AutoConfig, "from_pretrained", from_pretrained)
    assert LLMSettings(model=str(tmp_path)).facts(is_offline=True) is None  # without a tokenizer
    assert all(options["local_files_only"] for options in calls)


def test_damaged_weights_are_a_load_error(tmp_path: Path, tokenizer: Any) -> None:
    build("llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert Model.from_pretrained(tmp_path).num_layers == 4
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match="check the files"):
        Model.from_pretrained(tmp_path, revision="x")


def test_a_folder_that_cannot_be_blended(tmp_path: Path, tokenizer: Any) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2, vocab_size=1536)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        Model.from_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="rotary"):
        Model.from_pretrained(tmp_path, allow_unverified=True)


def test_equal_settings_share_one_model_as_long_as_it_is_used(tmp_path: Path) -> None:
    own = shutil.copytree(reader_path(), tmp_path / "own")  # other tests of this process may hold the reader
    one = Model.from_pretrained(own, dtype="float32")
    assert Model.from_pretrained(own, dtype="float32") is one
    assert Model.from_pretrained(own, dtype="bfloat16") is not one
    watch = weakref.ref(one)
    del one
    gc.collect()
    assert watch() is None


def test_threads_that_load_at_once_get_the_same_model() -> None:
    models: list[Model] = []
    threads = [
        threading.Thread(target=lambda: models.append(Model.from_pretrained("reader", dtype="float32")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(model) for model in models}) == 1
    assert len(models) == 4


def test_shared_engines(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"store": str(tmp_path / "a"), "dtype": "float32"}
    one = BlendEngine.shared("reader", **settings)
    assert BlendEngine.shared("reader", **settings) is one
    other = BlendEngine.shared("reader", **settings | {"store": str(tmp_path / "b")})
    assert other is not one
    assert other.model is one.model
    one.close()
    assert BlendEngine.shared("reader", **settings) is not one
    other.close()


@pytest.mark.parametrize("make", [Model.from_pretrained, BlendEngine.from_pretrained, BlendEngine.shared])
def test_unknown_settings_are_refused(make: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises((TypeError, SettingError), match="no_such_setting"):
        make("reader", no_such_setting=1)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "best"},
        {"ratio": 1.01},
        {"ratio": -0.1},
        {"ratio": float("nan")},
        {"ratio": "0.5"},
        {"ratio": True},
        {"min_run": 15},
        {"min_run": 20.5},
    ],
    ids=str,
)
def test_blend_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(settings))):
        BlendConfig(**settings)


@pytest.mark.parametrize("policy", ["best", "query:band=0:1", ["query"]])
def test_unknown_policies_are_refused(policy: Any) -> None:
    with pytest.raises(SettingError, match=r"unknown policy .*; choose one of none, full, first_k"):
        BlendConfig(policy=policy)


def test_unknown_blend_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="recompute_ratio"):
        BlendConfig(recompute_ratio=0.1)  # type: ignore[call-arg]


def test_the_window_error_gives_the_excess(model: Model) -> None:
    model.check_window(model.context_window - 1)
    with pytest.raises(ContextWindowError, match=rf"has {model.context_window + 9} tokens, 10 too many"):
        model.check_window(model.context_window + 9)


def test_bytes_per_token_is_what_a_chunk_takes(model: Model) -> None:
    cache = model.new_cache(10)
    model.forward(torch.arange(10)[None], cache)
    taken = sum(tensor.nbytes for layer in range(model.num_layers) for tensor in cache.layer(layer))
    assert model.bytes_per_token == taken / 10
