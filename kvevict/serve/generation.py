"""The thread that reads and writes, with what reads a prompt put around the model's `generate`."""

import asyncio
import contextlib
import functools

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving.utils import GenerateManager

from ..answer import keeping_all, within_positions
from ..compat import CACHE, cache_of
from ..context import within
from ..families import base_model, device_of, find_decoder
from ..patch import evicting
from ..policy.tokenizer import told
from ..question import Asked, LastTurn, find
from ..weights import identity
from .call import Call, Guard
from .errors import Refused
from .grammar import Calls, Following, Grammars
from .kept import shares
from .prefixes import Prefixes, key_of, mark_of
from .prompt import Prompt, of_chat, of_messages, of_text
from .sampling import Probabilities
from .written import Form, Written


class Writing(StoppingCriteria):
    """Takes each token as soon as it is chosen, gives what it tells, and ends `generate` with the answer."""

    def __init__(self, call: Call, written: Written, matcher, give):
        self.call, self.answer, self.give, self.seen = call, written, give, len(call.whole.ids)
        self.processors = call.sampling.processors(self.seen)
        if matcher is not None:
            self.processors.append(Following(matcher, self.seen))
        self.probabilities = next((each for each in self.processors if isinstance(each, Probabilities)), None)

    def __call__(self, input_ids, scores, **options):
        for token in input_ids[0, self.seen :].tolist():
            if not self.answer.ended:
                self.call.token()
                self.give(self.answer.put(token, self.probabilities and self.probabilities.of(token)))
        self.seen = input_ids.shape[1]
        return torch.tensor([self.answer.ended], device=input_ids.device)

    # A streamer that takes nothing: without one, Transformers writes a token too many on an accelerator, and crops it.

    def put(self, value) -> None:
        pass

    def end(self) -> None:
        pass


class Generation(GenerateManager):
    """Reads and writes one request after another, on the one thread of Transformers' manager.

    prefixes   where what was read is stored
    """

    def __init__(self, model, tokenizer, prefixes: Prefixes):
        super().__init__()
        self.model, self.tokenizer, self.prefixes = model, tokenizer, prefixes
        self.config, self.weights = find_decoder(model).config, identity(find_decoder(model))
        self.context = getattr(self.config, "max_position_embeddings", None)
        self.form = Form(tokenizer, model)
        self.grammars = Grammars(tokenizer, _listed(model.generation_config.eos_token_id))

    # -- in the event loop ------------------------------------------------------------------------------------------

    async def write(self, call: Call, answers: list):
        """(number of an answer, parts of it), as they are written; each token gives a list of parts. Raises what ends
        the call."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()

        def give(item) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, item)

        def run() -> None:
            try:
                for at, answer in enumerate(answers):
                    self._write(
                        call, at, Writing(call, answer, self._matcher(call), lambda parts, at=at: give((at, parts)))
                    )
                    give((at, answer.close()))
                give(None)
            except Exception as error:
                give(error)

        self.submit(run)
        while (item := await queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    def answers(self, call: Call) -> list:
        """The answers of a call, before their first tokens. They end with the context, too."""
        config = self._config(call)
        ends, stops = set(_listed(config.eos_token_id)), (*call.stop, *_listed(config.stop_strings))
        most = config.max_new_tokens
        return [Written(self.form, call.parser(), stops, ends, most, call.single) for _ in range(call.answers)]

    def _matcher(self, call: Call):
        return None if call.schema is None else self.grammars.matcher(call.schema)

    def _config(self, call: Call):
        config = call.sampling.config(self.model.generation_config)
        if self.context is not None:
            config.max_new_tokens = min(config.max_new_tokens, self.context - len(call.whole.ids))
        return config

    async def read(self, call: Call, prompt: Prompt) -> None:
        """Read a prompt's prefixes, and store the last one where a process that is killed leaves it."""

        def run():
            self._prefix(call, prompt)
            self.prefixes.flush(self._keys(call, prompt)[-1:])

        await self._in_thread(run)

    async def forget(self, owner: str, text: str) -> None:
        """Remove what was kept of a stored text, after what runs now."""
        await self._in_thread(self.prefixes.forget, mark_of(owner, text))

    async def kept(self, call: Call, prompt: Prompt, start: int):
        """By how large a share of heads each token of a prompt's last prefix, from `start` on, is kept."""
        return await self._in_thread(lambda: shares(self._prefix(call, prompt), start, prompt.ends[-1]))

    async def _in_thread(self, function, *args):
        """The result of a function that the thread runs. Who waits may be cancelled, not the thread's future: setting
        that one's result would end the thread."""
        future = asyncio.wrap_future(self.submit(function, *args))
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # known, if nobody waits any more
        return await asyncio.shield(future)

    # -- in a thread that tokenises ---------------------------------------------------------------------------------

    def prepare(self, call: Call) -> None:
        """Make the prompt of a call. Raises Refused where it does not fit the model's context."""
        if not call.messages:
            prompt = of_text(self.tokenizer, call.prompt, self.context, call.text)
            if isinstance(call.prompt, list):
                call.prompt = self.tokenizer.decode(call.prompt)
        elif call.hidden:
            prompt = of_messages(self.tokenizer, call.messages, call.template, self.context, call.text)
        else:
            prompt = of_chat(self.tokenizer, call.messages, call.template, self.context)
        if not prompt.ids:
            raise Refused(400, "the prompt is empty: give at least one word")
        call.whole, call.prompt_tokens = prompt, len(prompt.ids)
        if call.question is not None and find(self.tokenizer, prompt.ids, call.question) is None:
            raise Refused(400, "the prompt does not have kvevict.question: give its words as the prompt has them")
        self._matcher(call)  # refuses a schema
        if call.forced:
            call.parser = Calls
        elif call.messages and call.schema is None:
            call.parser = functools.partial(self.form.parser, prompt.ids, call.tools)

    # -- in the thread that generates -------------------------------------------------------------------------------

    def _write(self, call: Call, at: int, writing: Writing) -> None:
        """`generate` of one answer of a call."""
        call.check()
        config = self._config(call)
        config.stop_strings = None  # Transformers looks for them in the prompt, too
        prompt = call.whole
        ids = torch.tensor([prompt.ids], device=device_of(self.model))
        with contextlib.ExitStack() as stack:
            if call.seed is not None:
                stack.enter_context(torch.random.fork_rng())
                torch.manual_seed(call.seed + at)
            cache = self._prefix(call, prompt)
            stack.enter_context(self._reading(call, prompt, cache))
            stack.enter_context(within(watchers=(Guard(call),)))
            self.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), **{CACHE: cache}, streamer=writing,
                generation_config=config, stopping_criteria=StoppingCriteriaList([writing]),
                logits_processor=writing.processors,
            )  # fmt: skip

    def _prefix(self, call: Call, prompt: Prompt):
        """A cache of the prompt up to its last end, of which the longest stored prefix is not read again; None without
        an end."""
        keys = self._keys(call, prompt)
        cache, start, known = None, 0, len(keys)
        while known and cache is None:
            known -= 1
            cache = self.prefixes.get(keys[known])
        if cache is not None:
            known, start = known + 1, prompt.ends[known]
        call.cached_tokens = start
        for key, end in list(zip(keys, prompt.ends))[known:]:
            ids = torch.tensor([prompt.ids[start:end]], device=device_of(self.model))
            with self._evicting(call.policy, end), within(watchers=(Guard(call),)), torch.no_grad():
                out = base_model(self.model)(
                    input_ids=ids, **{CACHE: cache}, logits_to_keep=1, use_cache=True, return_dict=True
                )
            self.prefixes.put(key, cache_of(out))
            cache, start = cache_of(out).fork(), end
        return cache

    def _keys(self, call: Call, prompt: Prompt) -> list:
        start = len(prompt.ids) if prompt.text is None else prompt.text[0]
        return [
            key_of(call.owner, self.weights, call.policy, prompt.ids[:end], call.text if end > start else None)
            for end in prompt.ends
        ]

    @contextlib.contextmanager
    def _reading(self, call: Call, prompt: Prompt, cache):
        """Inside, the model reads what comes after a cache: all of it is kept where it is no longer than the budget."""
        tokens = len(prompt.ids)
        if cache is not None and tokens - cache.get_seq_length() <= call.policy.slots(tokens):
            with keeping_all(self.model, cache):
                yield
            return
        asks = None if call.hidden else self._asking(call, prompt)
        with self._evicting(call.policy, tokens), within(question=asks):
            yield

    def _asking(self, call: Call, prompt: Prompt):
        """Which tokens observe."""
        if call.question is not None:
            return Asked((find(self.tokenizer, prompt.ids, call.question),), self.tokenizer)
        said = [each["content"] for each in call.messages if each["role"] == "user"]
        return LastTurn(self.tokenizer, said[-1] if said else call.prompt)

    def _evicting(self, policy, tokens: int):
        if policy.rows.repeats and policy.chunk_size is not None:
            policy = within_positions(policy, self.config, tokens)
        return evicting(self.model, told(policy, self.tokenizer), tokenizer=False)


def _listed(value) -> list:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
