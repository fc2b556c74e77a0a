"""Transformers' handlers and model manager, for the one model that the server has."""

from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler, Modality

from ..prompts import rendered
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


class _Handler(BaseHandler):
    def _resolve_model(self, body):
        name = self.model_manager.force_model
        if body.get("model", name) != name:
            raise Refused(
                404, f"there is no model {str(body['model'])[:200]!r}: this server has {name!r}", "model_not_found"
            )
        body["model"] = name
        return name, *self.model_manager.load_model_and_processor()

    def get_processor_inputs_from_messages(self, messages, modality):
        """As Transformers', which the call notes. Raises ValueError for messages that the chat template refuses."""
        call, tokenizer = CALL.get(), self.model_manager.tokenizer
        if not tokenizer.chat_template:
            raise Refused(400, "the model has no chat template: ask at /v1/completions")
        call.messages = BaseHandler.get_processor_inputs_from_messages(messages, modality)
        rendered(tokenizer, call.messages, "these messages", **call.template)
        return call.messages

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


class Completions(_Handler, CompletionHandler):
    """/v1/completions."""


class Responses(_Handler, ResponseHandler):
    """/v1/responses."""
