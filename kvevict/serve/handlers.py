"""Transformers' handlers and model manager, for the one model that the server has."""

import torch
from transformers import BatchEncoding
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler, Modality

from .call import CALL
from .errors import Refused

LENGTHS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}


class Served(ModelManager):
    """A model that is loaded and patched already."""

    def __init__(self, name: str, model, tokenizer):
        super().__init__()
        self.force_model, self.model, self.tokenizer = name, model, tokenizer

    def load_model_and_processor(self, *args, **options):
        return self.model, self.tokenizer

    @staticmethod
    def get_model_modality(model, processor=None):
        return Modality.LLM  # a decoder that reads text


class Prepared:
    """The tokenizer of a call whose prompt has its ids: Transformers' handlers would make them in the event loop."""

    def __init__(self, tokenizer, ids: list):
        self._own, self._ids = tokenizer, ids

    def __getattr__(self, name):
        return getattr(self._own, name)

    def __call__(self, *args, **options) -> BatchEncoding:
        ids = torch.tensor([self._ids])
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    apply_chat_template = __call__


class _Handler(BaseHandler):
    def check(self, body) -> None:
        """Raise what Transformers' handler refuses, before there is a prompt."""
        self._validate_request(body)
        self._named(body)

    def messages_of(self, body) -> list:
        """A request's messages, as the chat template takes them."""
        raise NotImplementedError

    def _taken(self, messages: list) -> list:
        if not self._loaded()[1].chat_template:
            raise Refused(400, "the model has no chat template: ask at /v1/completions")
        return BaseHandler.get_processor_inputs_from_messages(messages, Modality.LLM)

    def _loaded(self) -> tuple:
        return self.model_manager.load_model_and_processor(self.model_manager.force_model or "")

    def _named(self, body):
        name = self.model_manager.force_model
        if body.get("model", name) != name:
            raise Refused(
                404, f"there is no model {str(body['model'])[:200]!r}: this server has {name!r}", "model_not_found"
            )
        return name

    def _resolve_model(self, body):
        model, tokenizer = self._loaded()
        body["model"] = self._named(body)
        return body["model"], model, Prepared(tokenizer, CALL.get().whole.ids)

    @staticmethod
    def get_processor_inputs_from_messages(messages, modality):
        return CALL.get().messages

    def _build_generation_config(self, body, model_generation_config, use_cb=False):
        """As Transformers'; a temperature samples, whatever the model's own configuration does."""
        config = super()._build_generation_config(body, model_generation_config, use_cb=use_cb)
        for name, value in CALL.get().sampling.items():
            if not body.keys() & (LENGTHS if name == "max_new_tokens" else {name}):
                setattr(config, name, value)
        if body.get("temperature"):
            config.do_sample = True
        return config


class Chat(_Handler, ChatCompletionHandler):
    """/v1/chat/completions."""

    def messages_of(self, body) -> list:
        return self._taken(body["messages"])


class Completions(_Handler, CompletionHandler):
    """/v1/completions."""

    def messages_of(self, body) -> list:
        return []


class Responses(_Handler, ResponseHandler):
    """/v1/responses."""

    def messages_of(self, body) -> list:
        return self._taken(ResponseHandler._normalize_input(body))

    @staticmethod
    def _normalize_input(body):
        return CALL.get().messages
