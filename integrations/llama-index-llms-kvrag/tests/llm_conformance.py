"""Conformance tests for any LlamaIndex LLM, as a suite to subclass.

The suite depends on LlamaIndex only. The model may be tiny or random, but must be greedy and must not stop by itself.

    class TestMyLLM(LLMTests):
        context_window = 2048

        @pytest.fixture
        def make(self):
            return lambda max_tokens: MyLLM(..., temperature=0, max_tokens=max_tokens)

        @pytest.fixture
        def tokenizer(self): ...

        @pytest.fixture
        def prompts(self, monkeypatch): ...
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import llama_index.core
import pytest
from llama_index.core import MockEmbedding, PromptTemplate, Settings, StorageContext, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock, ToolCallBlock
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.exception import ExceptionEvent
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionStartEvent,
    LLMPredictStartEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms import LLM
from llama_index.core.node_parser import HierarchicalNodeParser, SentenceWindowNodeParser, get_leaf_nodes
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.schema import BaseNode, Document, TextNode
from llama_index.core.tools import FunctionTool
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.events.span import SpanDropEvent
from pydantic import BaseModel, Field

logger = logging.getLogger(__name__)

QUESTION = "Who plays the harp?"
USER = [ChatMessage(role="user", content=QUESTION)]
PEOPLE = ("Mira Brel", "Kan Dror", "Zel Vinford", "Ona Tass", "Ulf Marn", "Ria Kost", "Bo Lind", "Eva Stor", "Jon Pell")
THINGS = ("harp", "banjo", "flute", "drum", "violin", "horn", "lute", "organ", "zither")
WAYS = ["sync", "stream", "async", "astream"]


class Person(BaseModel):
    """Somebody."""

    name: Literal["Mira", "Kan"]
    age: int = Field(ge=0, le=150)
    is_tall: bool


class Wanted(BaseModel):
    """Whom to look up."""

    name: Literal["Mira", "Kan"]
    is_new: bool


class Numbers(BaseModel):
    """What to add."""

    a: int = Field(ge=0, le=9)
    b: Literal[1, 2]


class Events(BaseEventHandler):
    """Event handler that records all events."""

    seen: list[Any] = Field(default_factory=list)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Record an event."""
        self.seen.append(event)

    def of(self, *kinds: type[BaseEvent]) -> list[Any]:
        """Return the recorded events of these types."""
        return [event for event in self.seen if isinstance(event, kinds)]

    def answers(self) -> list[Any]:
        """Return the completed calls of the LLM."""
        return self.of(LLMChatEndEvent, LLMCompletionEndEvent)

    def check_balance(self, calls: int) -> None:
        """Check that every started call of the LLM has ended, successfully or not."""
        starts = [event.span_id for event in self.of(LLMChatStartEvent, LLMCompletionStartEvent)]
        ends = [event.span_id for event in [*self.answers(), *self.of(ExceptionEvent, SpanDropEvent)]]
        assert len(starts) >= calls
        assert set(starts) <= set(ends)


def paragraph(number: int) -> str:
    """Return some sentences about a person."""
    name, thing = PEOPLE[number], THINGS[number]
    return (
        f"{name} was born in a small town by the sea in {1950 + number}. "
        f"As a child {name} learned to play the {thing}, and has never stopped since. "
        f"Every {['Monday', 'Tuesday', 'Friday'][number % 3]} there is a concert of the {thing} in the old school. "
        f"The house of {name} has {number + 2} windows and stands on hill number {37 * number + 11}. "
        f"Behind it grow {['apples', 'pears', 'plums', 'cherries'][number % 4]}, which the neighbours like very much. "
        f"The company that {name} works for sells chairs and tables, {number + 3} each week."
    )


def a_node(number: int) -> TextNode:
    """Return a node with metadata, which prompts contain."""
    return TextNode(text=paragraph(number), id_=f"node {number}", metadata={"file_path": f"/data/{number}.txt"})


def template(tokenizer: Any, **messages: str) -> list[int]:
    """Return the token ids of a prompt with one message per role."""
    said = [{"role": role, "content": content} for role, content in messages.items()]
    ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=True, return_dict=False)
    return list(ids)


def in_time(function: Callable[[], Any]) -> None:
    """Call a function that may hang, with a time limit."""
    errors: list[BaseException] = []

    def calling() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=calling, daemon=True)
    thread.start()
    thread.join(60)
    if thread.is_alive():
        pytest.fail("it hangs")
    for error in errors:
        raise error


async def ask(engine: Callable[[bool], Any], question: str, way: str) -> str:
    """Query an engine, built with or without streaming."""
    streaming = way in ("stream", "astream")
    if way in ("sync", "stream"):
        answer = engine(streaming).query(question)
        return "".join(answer.response_gen) if streaming else str(answer)
    answer = await engine(streaming).aquery(question)
    return "".join([text async for text in answer.async_response_gen()]) if streaming else str(answer)


async def say(engine: Any, message: str, way: str) -> str:
    """Send one chat message and return the answer."""
    if way == "sync":
        return str(engine.chat(message))
    if way == "stream":
        return "".join(engine.stream_chat(message).response_gen)
    if way == "async":
        return str(await engine.achat(message))
    return "".join([text async for text in (await engine.astream_chat(message)).async_response_gen()])


class MethodTests:
    """Methods of an LLM, and query engines and agents that get objects and calls from it.

    Override `make`, `tokenizer`, `prompts` and `context_window`, and the other attributes where they apply.

    Attributes:
        context_window: Context window of the model.
        reuses: The LLM reuses the nodes of `vector_store` in its prompts: it has `encode`, and `raw["kvrag"]` of its
            responses contains `prompt_tokens`, `fresh_tokens` and `conversation_tokens`.
    """

    context_window: int
    reuses = False

    @pytest.fixture
    def make(self) -> Callable[[int], LLM]:
        """Return a function that makes an LLM with a maximum answer length, which its answers reach."""
        raise NotImplementedError("override the fixture make")

    @pytest.fixture
    def tokenizer(self) -> Any:
        """Return the model's transformers tokenizer."""
        raise NotImplementedError("override the fixture tokenizer")

    @pytest.fixture
    def prompts(self) -> list[list[int]]:
        """Return a list to which the token ids of every prompt are appended as it reaches the model."""
        raise NotImplementedError("override the fixture prompts")

    @pytest.fixture
    def llm(self, make: Callable[[int], LLM]) -> LLM:
        """Return an LLM with short answers."""
        return make(16)

    @pytest.fixture
    def wordy(self, make: Callable[[int], LLM]) -> LLM:
        """Return an LLM with room for an object or a call."""
        return make(160)

    def vector_store(self, llm: Any, **settings: Any) -> BasePydanticVectorStore:
        """Return the vector store in which an application of this LLM keeps its nodes."""
        return SimpleVectorStore()

    @pytest.fixture(autouse=True)
    def _defaults(self, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make LlamaIndex count tokens like this model."""
        for name in ("_llm", "_tokenizer", "_prompt_helper", "_callback_manager"):
            monkeypatch.setattr(Settings, name, None)
        monkeypatch.setattr(Settings, "_embed_model", MockEmbedding(embed_dim=4))
        monkeypatch.setattr(llama_index.core, "global_tokenizer", None)
        Settings.tokenizer = tokenizer.encode

    @pytest.fixture
    def events(self) -> Iterator[Events]:
        """Record all events during the test."""
        handler, dispatcher = Events(), get_dispatcher()
        dispatcher.add_event_handler(handler)
        yield handler
        dispatcher.event_handlers.remove(handler)

    def index(self, llm: LLM, nodes: Sequence[BaseNode], **settings: Any) -> VectorStoreIndex:
        """Return an index of these nodes."""
        context = StorageContext.from_defaults(vector_store=self.vector_store(llm, **settings))
        return VectorStoreIndex(list(nodes), storage_context=context)

    def check_coverage(self, llm: Any, events: Events, least: float) -> None:
        """Check that most tokens pasted from nodes were found in the store, conversations not counted."""
        if not self.reuses:
            return
        pasted = stored = 0
        for call in events.of(LLMPredictStartEvent, LLMStructuredPredictStartEvent):
            given = call.template_args or {}
            pasted += len(llm.encode(given.get("context_str") or given.get("context_msg") or ""))
        for call in events.answers():
            told = call.response.raw["kvrag"]
            assert told["conversation_tokens"] == 0  # tokens of template and question would be included
            stored += told["prompt_tokens"] - told["fresh_tokens"]
        assert pasted > 0
        logger.info("%.1f %% of the tokens pasted from nodes were stored", 100 * stored / pasted)
        assert stored / pasted >= least

    # ---------------------------------------------------------------- the eight methods

    def test_metadata_are_the_models(self, llm: LLM) -> None:
        """Window, maximum answer length and kind are correct."""
        assert llm.metadata.context_window == self.context_window
        assert llm.metadata.num_output == 16
        assert llm.metadata.is_chat_model
        assert llm.metadata.model_name

    @pytest.mark.asyncio
    async def test_all_methods_give_the_same_answer(self, llm: LLM) -> None:
        """Sync and async methods return the same answer."""
        chat = llm.chat(USER).message
        assert chat.role == MessageRole.ASSISTANT
        assert chat.content
        assert (await llm.achat(USER)).message.content == chat.content
        complete = llm.complete(QUESTION)
        assert complete.text
        assert (await llm.acomplete(QUESTION)).text == complete.text

    @pytest.mark.asyncio
    async def test_pieces_of_a_stream_add_up(self, llm: LLM) -> None:
        """The text of a stream is cumulative; deltas are the added pieces."""
        chat, complete = llm.chat(USER).message.content, llm.complete(QUESTION).text
        streams: list[tuple[Any, list[tuple[Any, Any]]]] = [
            (chat, [(piece.message.content, piece.delta) for piece in llm.stream_chat(USER)]),
            (chat, [(piece.message.content, piece.delta) async for piece in await llm.astream_chat(USER)]),
            (complete, [(piece.text, piece.delta) for piece in llm.stream_complete(QUESTION)]),
            (complete, [(piece.text, piece.delta) async for piece in await llm.astream_complete(QUESTION)]),
        ]
        for whole, pieces in streams:
            said = ""
            for text, delta in pieces:
                said += delta or ""
                assert text == said
            assert said == whole
            assert len(pieces) > 3

    def test_messages_are_rendered_by_the_template(self, llm: LLM, tokenizer: Any, prompts: list[list[int]]) -> None:
        """Prompts equal the chat template's output, with one BOS."""
        llm.chat(USER)
        assert prompts == [template(tokenizer, user=QUESTION)]

    def test_a_text_is_a_user_message(self, llm: LLM, tokenizer: Any, prompts: list[list[int]]) -> None:
        """A text is one user message, unless it is formatted."""
        llm.complete(QUESTION)
        assert prompts == [template(tokenizer, user=QUESTION)]

    def test_a_formatted_prompt_is_taken_as_it_is(self, llm: LLM, tokenizer: Any, prompts: list[list[int]]) -> None:
        """A formatted prompt is used unchanged."""
        llm.complete(QUESTION, formatted=True)
        assert prompts == [tokenizer(QUESTION)["input_ids"]]

    def test_the_system_prompt_is_used(
        self, make: Callable[[int], LLM], tokenizer: Any, prompts: list[list[int]]
    ) -> None:
        """The LLM's system prompt is used where prompts are templates."""
        llm = make(16)
        llm.system_prompt = "Speak of plums and pears only."
        llm.predict(PromptTemplate("{question}"), question=QUESTION)
        assert prompts == [template(tokenizer, system=llm.system_prompt, user=QUESTION)]

    def test_stop_strings_end_the_answer(self, llm: LLM) -> None:
        """Stop strings end the answer regardless of token boundaries, complete and streamed."""
        text = llm.complete(QUESTION).text
        stop = text[len(text) // 2 :][:3]
        expected = text[: text.find(stop)]
        assert llm.complete(QUESTION, stop=[stop]).text == expected
        assert "".join(piece.delta or "" for piece in llm.stream_complete(QUESTION, stop=[stop])) == expected

    def test_a_call_can_limit_the_length_of_its_answer(self, llm: LLM) -> None:
        """`max_tokens` can be given per call."""
        text = llm.complete(QUESTION).text
        short = llm.complete(QUESTION, max_tokens=4).text
        assert text.startswith(short)
        assert len(short) < len(text)

    def test_all_kinds_of_messages_are_in_the_prompt(self, llm: LLM, tokenizer: Any, prompts: list[list[int]]) -> None:
        """Several messages of a role, tool calls and tool results reach the model in order."""
        call = ToolCallBlock(tool_call_id="abc123def", tool_name="look_up", tool_kwargs={"name": "Mira"})
        conversation = [
            ChatMessage(role="system", content="You help."),
            ChatMessage(role="system", content="You are brief."),
            ChatMessage(role="user", blocks=[TextBlock(text="Look up Mira."), TextBlock(text="And be quick.")]),
            ChatMessage(role="assistant", blocks=[call]),
            ChatMessage(role="tool", content="She plays.", additional_kwargs={"tool_call_id": "abc123def"}),
            ChatMessage(role="assistant", content="She plays something."),
            ChatMessage(role="user", content="What?"),
        ]
        assert llm.chat(conversation).message.content
        prompt = tokenizer.decode(prompts[-1])
        at = [
            prompt.find(text) for text in ("help", "brief", "Mira.", "quick", "look_up", "plays.", "something", "What?")
        ]
        assert -1 not in at
        assert at == sorted(at)

    def test_images_are_refused(self, llm: LLM) -> None:
        """Images raise an error instead of being ignored."""
        blocks = [TextBlock(text="What is this?"), ImageBlock(image=b"png")]
        with pytest.raises(Exception, match="image"):
            llm.chat([ChatMessage(role="user", blocks=blocks)])

    def test_a_prompt_that_does_not_fit_is_refused(self, llm: LLM) -> None:
        """A prompt that is too long raises an error instead of being cut."""
        with pytest.raises(Exception, match=str(self.context_window)):
            llm.complete("harp " * self.context_window)

    def test_control_tokens_in_a_message_are_text(self, llm: LLM, tokenizer: Any, prompts: list[list[int]]) -> None:
        """A document cannot end the prompt or act as the system."""
        end = tokenizer.eos_token
        llm.complete("He said so."), llm.complete(f"He said {end} so.")
        assert [prompt.count(tokenizer.eos_token_id) for prompt in prompts] == [
            prompts[0].count(tokenizer.eos_token_id)
        ] * 2
        assert f"He said {end} so." in tokenizer.decode(prompts[1])

    def test_usage_is_reported(self, make: Callable[[int], LLM]) -> None:
        """Usage is reported where LlamaIndex's token counter reads it."""
        llm = make(16)
        counter = TokenCountingHandler(tokenizer=lambda text: [])
        llm.callback_manager = CallbackManager([counter])
        llm.chat(USER)
        assert counter.completion_llm_token_count == 16
        once = counter.prompt_llm_token_count
        assert once > 3
        for _ in llm.stream_chat(USER):
            pass
        assert (counter.prompt_llm_token_count, counter.completion_llm_token_count) == (2 * once, 32)

    # ---------------------------------------------------------------- events, threads, copies

    @pytest.mark.asyncio
    async def test_every_start_event_has_an_end_event(self, make: Callable[[int], LLM], events: Events) -> None:
        """Events and callbacks of answers end, complete and streamed."""
        llm, debug = make(4), LlamaDebugHandler(print_trace_on_end=False)
        llm.callback_manager = CallbackManager([debug])
        llm.chat(USER), llm.complete(QUESTION)
        await llm.achat(USER), await llm.acomplete(QUESTION)
        list(llm.stream_chat(USER)), list(llm.stream_complete(QUESTION))
        [piece async for piece in await llm.astream_chat(USER)]
        [piece async for piece in await llm.astream_complete(QUESTION)]
        events.check_balance(8)
        assert {len(pair) for pair in debug.get_event_pairs(CBEventType.LLM)} == {2}

    @pytest.mark.asyncio
    async def test_events_end_on_every_failure(self, llm: LLM, events: Events) -> None:
        """An empty prompt raises an error, and its events end."""
        debug = LlamaDebugHandler(print_trace_on_end=False)
        llm.callback_manager = CallbackManager([debug])
        with pytest.raises(Exception, match=r"\w"):
            llm.complete("", formatted=True)
        with pytest.raises(Exception, match=r"\w"):
            await llm.acomplete("", formatted=True)
        with pytest.raises(Exception, match=r"\w"):
            in_time(lambda: list(llm.stream_complete("", formatted=True)))
        with pytest.raises(Exception, match=r"\w"):
            [piece async for piece in await llm.astream_complete("", formatted=True)]
        events.check_balance(4)
        assert {len(pair) for pair in debug.get_event_pairs(CBEventType.LLM)} == {2}

    @pytest.mark.asyncio
    async def test_events_end_when_a_stream_is_dropped(self, llm: LLM, events: Events) -> None:
        """Closing a stream ends its events and its work."""
        llm.complete(QUESTION)  # starts the threads that a model keeps
        before = set(threading.enumerate())
        for stream in (llm.stream_chat(USER), llm.stream_complete(QUESTION)):
            next(stream)
            stream.close()
            assert set(threading.enumerate()) <= before
        for astream in (await llm.astream_chat(USER), await llm.astream_complete(QUESTION)):
            await anext(astream)
            await astream.aclose()
        events.check_balance(5)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("method", ["achat", "acomplete", "astream_chat", "astream_complete"])
    async def test_the_event_loop_is_not_blocked(self, llm: LLM, method: str) -> None:
        """The event loop is not blocked while the model computes."""
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        answer = await getattr(llm, method)(USER if "chat" in method else QUESTION)
        if "stream" in method:
            assert [piece async for piece in answer]
        ticking.cancel()
        assert ticks > 16  # one per token

    @pytest.mark.asyncio
    async def test_answers_at_once_do_not_disturb_each_other(self, llm: LLM) -> None:
        """Concurrent answers, complete and streamed, do not affect each other."""
        questions = [f"Who plays the {thing}?" for thing in THINGS[:4]]
        expected = [llm.complete(question).text for question in questions]
        answers = await asyncio.gather(*[llm.acomplete(question) for question in questions])
        assert [answer.text for answer in answers] == expected
        streams = [await llm.astream_complete(question) for question in questions]
        said = [""] * len(streams)
        is_open = True
        while is_open:
            pieces = [await anext(stream, None) for stream in streams]
            said = [text if piece is None else piece.text for text, piece in zip(said, pieces, strict=True)]
            is_open = any(pieces)
        assert said == expected

    def test_it_can_be_pickled_and_serialised(self, llm: LLM) -> None:
        """The LLM can be pickled and serialised without the model."""
        text = llm.complete(QUESTION).text
        pickled = pickle.dumps(llm)
        assert len(pickled) < 100_000
        assert pickle.loads(pickled).complete(QUESTION).text == text
        data = json.loads(llm.to_json())
        assert data["class_name"] == llm.class_name()
        assert type(llm).from_dict(data).complete(QUESTION).text == text

    # ---------------------------------------------------------------- objects and tools

    @pytest.mark.asyncio
    async def test_objects_of_a_class(self, wordy: LLM) -> None:
        """Structured output returns an object of the class."""
        prompt = PromptTemplate("Describe {name}.")
        person = wordy.structured_predict(Person, prompt, name="Mira")
        assert isinstance(person, Person)
        assert await wordy.astructured_predict(Person, prompt, name="Mira") == person
        assert list(wordy.stream_structured_predict(Person, prompt, name="Mira"))[-1] == person
        pieces = [piece async for piece in await wordy.astream_structured_predict(Person, prompt, name="Mira")]
        assert pieces[-1] == person
        said = wordy.as_structured_llm(Person).chat([ChatMessage(role="user", content="Describe Mira.")])
        assert isinstance(said.raw, Person)

    def test_a_query_engine_can_answer_with_an_object(self, wordy: LLM, events: Events) -> None:
        """Query engines can return an object."""
        index = self.index(wordy, [a_node(number) for number in range(3)])
        answer: Any = index.as_query_engine(llm=wordy, output_cls=Person, response_mode="compact").query(QUESTION)
        assert isinstance(answer.response, Person)
        self.check_coverage(wordy, events, 0.99)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("streaming", [False, True])
    async def test_agents_call_tools(self, wordy: LLM, streaming: bool) -> None:
        """A forced tool gets valid arguments, and the agent continues with its result."""
        called = []

        def look_up(name: str, is_new: bool) -> str:
            """Tell about somebody."""
            called.append((name, is_new))
            return f"{name} plays the harp."

        agent = FunctionAgent(
            tools=[FunctionTool.from_defaults(look_up, fn_schema=Wanted)],
            llm=wordy,
            system_prompt="You look people up.",
            initial_tool_choice="look_up",
            streaming=streaming,
        )
        running: Any = agent.run(user_msg=QUESTION)
        results = [event async for event in running.stream_events() if isinstance(event, ToolCallResult)]
        response = await running
        ((name, is_new),) = called
        assert name in ("Mira", "Kan")
        assert isinstance(is_new, bool)
        assert [result.tool_output.content for result in results] == [f"{name} plays the harp."]
        assert response.response.content

    def test_tools_can_be_called_without_an_agent(self, wordy: Any) -> None:
        """Tools can be called without an agent, one at a time unless more are allowed."""

        def add(a: int, b: int) -> int:
            """Add numbers."""
            return a + b

        tool = FunctionTool.from_defaults(add, fn_schema=Numbers)
        response = wordy.chat_with_tools([tool], user_msg="Add 1 and 2.", tool_required=True)
        (call,) = wordy.get_tool_calls_from_response(response)
        assert call.tool_name == "add"
        assert call.tool_kwargs["b"] in (1, 2)
        answer = wordy.predict_and_call([tool], user_msg="Add 1 and 2.", tool_required=True)
        assert str(answer) == str(call.tool_kwargs["a"] + call.tool_kwargs["b"])
        with pytest.raises(ValueError, match="tool"):
            wordy.get_tool_calls_from_response(wordy.chat(USER, max_tokens=4))


class LLMTests(MethodTests):
    """All tests: query and chat engines, which call the methods with all kinds of prompts, are included."""

    # ---------------------------------------------------------------- query engines

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("mode", "calls"),
        [
            (ResponseMode.REFINE, 3),
            (ResponseMode.COMPACT, 1),
            (ResponseMode.SIMPLE_SUMMARIZE, 1),
            (ResponseMode.TREE_SUMMARIZE, 1),
            (ResponseMode.GENERATION, 1),
            (ResponseMode.NO_TEXT, 0),
            (ResponseMode.CONTEXT_ONLY, 0),
            (ResponseMode.ACCUMULATE, 3),
            (ResponseMode.COMPACT_ACCUMULATE, 1),
        ],
    )
    async def test_every_response_mode(
        self, llm: LLM, events: Events, prompts: list[list[int]], mode: ResponseMode, calls: int
    ) -> None:
        """Every response mode gives the same answer with every method."""
        nodes = [a_node(number) for number in range(3)]
        index = self.index(llm, nodes)
        Settings.llm = llm  # modes without an LLM still require one

        def engine(streaming: bool) -> Any:
            return index.as_query_engine(llm=llm, response_mode=mode, similarity_top_k=3, streaming=streaming)

        answer = await ask(engine, QUESTION, "sync")
        assert len(prompts) == calls
        if calls:
            assert answer not in ("", "Empty Response")
        if calls and mode not in (ResponseMode.GENERATION, ResponseMode.SIMPLE_SUMMARIZE):  # it pastes a Python list
            self.check_coverage(llm, events, 0.99)
        assert await ask(engine, QUESTION, "async") == answer
        if calls and mode not in (ResponseMode.ACCUMULATE, ResponseMode.COMPACT_ACCUMULATE):  # it cannot stream
            assert await ask(engine, QUESTION, "stream") == answer
            assert await ask(engine, QUESTION, "astream") == answer

    @pytest.mark.parametrize("mode", [ResponseMode.COMPACT, ResponseMode.TREE_SUMMARIZE])
    def test_nodes_that_do_not_fit_into_one_prompt(
        self, llm: LLM, events: Events, prompts: list[list[int]], mode: ResponseMode
    ) -> None:
        """LlamaIndex splits long nodes by the LLM's window and tokenizer."""
        size = sum(len(Settings.tokenizer(paragraph(number))) for number in range(len(PEOPLE)))
        times = self.context_window // size + 1
        nodes = [a_node(number) for number in range(len(PEOPLE))]
        for node in nodes:
            node.text = " ".join(f"{node.text} This is part {part} about {node.id_}." for part in range(times))
        index = self.index(llm, nodes)
        answer = index.as_query_engine(llm=llm, response_mode=mode, similarity_top_k=len(nodes)).query(QUESTION)
        assert str(answer) not in ("", "Empty Response")
        assert len(prompts) > 1
        assert max(map(len, prompts)) <= self.context_window
        events.check_balance(2)
        if mode == ResponseMode.COMPACT:  # summaries of summaries are not stored chunks
            self.check_coverage(llm, events, 0.95)

    def test_citations(self, llm: LLM, events: Events) -> None:
        """Citations split nodes again and number them."""
        index = self.index(llm, [a_node(number) for number in range(3)])
        engine = CitationQueryEngine.from_args(index, llm=llm, similarity_top_k=3, citation_chunk_size=512)
        assert str(engine.query(QUESTION)) not in ("", "Empty Response")
        self.check_coverage(llm, events, 0.95)

    def test_sentences_in_their_windows(self, llm: LLM, events: Events) -> None:
        """Sentences are retrieved, and the prompt contains their windows."""
        parser = SentenceWindowNodeParser.from_defaults(sentence_splitter=lambda text: re.split(r"(?<=\.) ", text))
        nodes = parser.get_nodes_from_documents([Document(text=paragraph(number)) for number in range(3)])
        index = self.index(llm, nodes, target_metadata_key="window")
        engine = index.as_query_engine(
            llm=llm, similarity_top_k=3, node_postprocessors=[MetadataReplacementPostProcessor("window")]
        )
        assert str(engine.query(QUESTION)) not in ("", "Empty Response")
        self.check_coverage(llm, events, 0.99)

    def test_leaves_are_merged(self, llm: LLM, events: Events) -> None:
        """Leaf nodes are retrieved, and the prompt contains their parent."""
        text = " ".join(paragraph(number) for number in range(3))
        parser = HierarchicalNodeParser.from_defaults(chunk_sizes=[2048, 128], chunk_overlap=0)
        nodes = parser.get_nodes_from_documents([Document(text=text)])
        leaves = get_leaf_nodes(nodes)
        assert 1 < len(leaves) < len(nodes)
        context = StorageContext.from_defaults(vector_store=self.vector_store(llm))
        context.docstore.add_documents(nodes)
        index = VectorStoreIndex(leaves, storage_context=context)
        found: Any = index.as_retriever(similarity_top_k=len(leaves))
        retriever = AutoMergingRetriever(found, context)
        assert [merged.node.node_id for merged in retriever.retrieve(QUESTION)] == [nodes[0].node_id]
        assert str(RetrieverQueryEngine.from_args(retriever, llm=llm).query(QUESTION)) not in ("", "Empty Response")
        self.check_coverage(llm, events, 0.99)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("mode", ["simple", "context", "condense_question", "condense_plus_context"])
    async def test_chat_engines(self, llm: LLM, events: Events, mode: Any) -> None:
        """Two turns give the same answers with every method."""
        nodes = [a_node(number) for number in range(3)]
        index = self.index(llm, nodes)
        said: dict[str, tuple[str, str]] = {}
        for way in WAYS:
            engine = index.as_chat_engine(chat_mode=mode, llm=llm, similarity_top_k=3)
            first = await say(engine, QUESTION, way)
            if way == "sync" and mode in ("context", "condense_plus_context"):
                self.check_coverage(llm, events, 0.99)
            said[way] = first, await say(engine, "And who else?", way)
        assert all(said["sync"])
        assert said["async"] == said["sync"]
        assert said["stream"][0] == said["sync"][0]
        assert said["astream"] == said["stream"]  # the second turn contains the stripped first answer
