"""A model of random weights, and the bundled model's tokenizer."""

import pytest
import tiny
from transformers import AutoTokenizer

import kvevict


@pytest.fixture(scope="module")
def net():
    return tiny.model()


@pytest.fixture(scope="module")
def words():
    return AutoTokenizer.from_pretrained(kvevict.small_llama())
