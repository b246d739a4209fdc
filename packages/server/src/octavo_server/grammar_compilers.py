"""The grammar compiler of an engine; the grammar library is imported when it is needed first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo_core.grammar import Grammar
from octavo_core.grammar_compiler import GrammarCompiler
from octavo_core.model_spec import ModelSpec
from octavo_core.structured_outputs import StructuredOutputsParams
from octavo_server.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from octavo_server.llguidance_backend import LLGuidanceBackend


def make_grammar_compiler(
    model_path: str | Path, spec: ModelSpec, tokenizer: Tokenizer | None = None
) -> GrammarCompiler:
    """Return the compiler for a model.

    Args:
        model_path: Folder or .gguf file.
        spec: The model's hyper-parameters.
        tokenizer: The model's, if it is loaded already.
    """
    return GrammarCompiler(LazyGrammarBackend(model_path, spec, tokenizer))


class LazyGrammarBackend:
    """Loads the library and the vocabulary when they are needed first.

    Args:
        model_path: Folder or .gguf file.
        spec: The model's hyper-parameters.
        tokenizer: The model's, if it is loaded already.
    """

    def __init__(
        self, model_path: str | Path, spec: ModelSpec, tokenizer: Tokenizer | None = None
    ) -> None:
        self._model_path = model_path
        self._spec = spec
        self._tokenizer = tokenizer
        self._backend: LLGuidanceBackend | None = None

    def prepare(self) -> None:
        """Load both."""
        self._loaded().prepare()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Compile a constraint.

        Raises:
            InvalidRequestError: It can't be served.
        """
        return self._loaded().compile(params)

    def _loaded(self) -> LLGuidanceBackend:
        if self._backend is None:
            from octavo_server.grammar_vocabulary import model_vocabulary
            from octavo_server.llguidance_backend import LLGuidanceBackend

            tokenizer = self._tokenizer or load_tokenizer(self._model_path)
            self._backend = LLGuidanceBackend(lambda: model_vocabulary(tokenizer, self._spec))
        return self._backend
