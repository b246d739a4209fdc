"""The methods of `LLM` for models that pool texts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from octavo_core.errors import InvalidRequestError
from octavo_core.pooling_params import PooledOutput, PoolingTask
from octavo_core.wire import EngineCoreRequest
from octavo_server.input_processor import InputProcessor
from octavo_server.pooled_output import to_numbers, to_rows
from octavo_server.pooling_input_processor import PoolingInputProcessor, PoolingOptions
from octavo_server.pooling_request_output import (
    ClassificationOutput,
    EmbeddingOutput,
    PooledVectors,
    PoolingRequestOutput,
    ScoringOutput,
)
from octavo_server.prompts import Prompt, as_prompts
from octavo_server.scored_pairs import prepare_pairs


class PoolingMethods:
    """`LLM.embed`, `LLM.encode`, `LLM.classify` and `LLM.score`."""

    _input_processor: InputProcessor
    _ids: count[int]

    def embed(
        self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True, **options: Any
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Make a vector of each text.

        Args:
            prompts: One text or several; token ids are taken as they are.
            use_tqdm: Show a progress bar.
            options: Fields of `PoolingOptions`, such as ``dimensions``, ``use_activation`` or
                ``truncate_prompt_tokens``.

        Returns:
            One output for each text, in their order.

        Raises:
            InvalidRequestError: The model makes no embeddings, or a text or an option can't be
                used. Nothing has run.
            RequestFailedError: The engine failed on a text.
        """
        requests, pooled = self._pool_texts(prompts, "embed", use_tqdm, options)
        return [
            _result(request, EmbeddingOutput(embedding=to_numbers(output)))
            for request, output in zip(requests, pooled, strict=True)
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_task: PoolingTask | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[PoolingRequestOutput[PooledVectors]]:
        """Make whatever the model makes of texts, by default a vector of each token.

        Args:
            prompts: As in `embed`.
            pooling_task: ``embed``, ``classify``, ``token_embed`` or ``token_classify``.
            use_tqdm: Show a progress bar.
            options: As in `embed`.

        Raises:
            InvalidRequestError: As in `embed`.
            RequestFailedError: The engine failed on a text.
        """
        task = pooling_task or self._pooling_processor().pooler.tasks[-1]
        requests, pooled = self._pool_texts(prompts, task, use_tqdm, options)
        return [
            _result(request, PooledVectors(data=_numbers(output)))
            for request, output in zip(requests, pooled, strict=True)
        ]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True, **options: Any
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Say for each text which class it is of. Arguments and errors as in `embed`."""
        requests, pooled = self._pool_texts(prompts, "classify", use_tqdm, options)
        labels = self._pooling_processor().pooler.labels
        results = []
        for request, output in zip(requests, pooled, strict=True):
            probs = to_numbers(output)
            label = labels[probs.index(max(probs))]
            results.append(_result(request, ClassificationOutput(label=label, probs=probs)))
        return results

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Say how well pairs of texts fit: by a cross-encoder, or by their embeddings' angle.

        Args:
            data_1: One text, or as many as there are in `data_2`.
            data_2: One text or several.
            use_tqdm: Show a progress bar.
            options: As in `embed`.

        Raises:
            InvalidRequestError: As in `embed`; or the two make no pairs.
            RequestFailedError: The engine failed on a text.
        """
        processor = self._pooling_processor()
        if len(processor.pooler.labels) > 1:
            raise InvalidRequestError(
                f"this model scores texts for {len(processor.pooler.labels)} classes, and pairs "
                f"are scored with one number; use classify.",
                field="data_1",
            )
        first, second = _as_list(data_1), _as_list(data_2)
        if not second or len(first) not in (1, len(second)):
            raise InvalidRequestError(
                f"data_1 has {len(first)} texts and data_2 has {len(second)}; they must be 1 and "
                f"1, 1 and N, or N and N.",
                field="data_1",
            )
        request_id = f"llm-{next(self._ids)}"
        fields = ("data_1", "data_2")
        pairs = prepare_pairs(
            processor, request_id, data_1, data_2, PoolingOptions(**options), fields
        )
        scores = pairs.scores(self._run_pooling(pairs.requests, use_tqdm))
        return [
            PoolingRequestOutput(
                request_id=f"{request_id}-{index}",
                prompt_token_ids=pairs.token_ids(index),
                outputs=ScoringOutput(score=score),
            )
            for index, score in enumerate(scores)
        ]

    def _pool_texts(
        self,
        prompts: Prompt | Sequence[Prompt],
        task: PoolingTask,
        use_tqdm: bool,
        options: dict[str, Any],
    ) -> tuple[list[EngineCoreRequest], list[PooledOutput]]:
        processor = self._pooling_processor()
        checked = PoolingOptions(**options).replace(task=task)
        processor.check_options(checked)
        requests = [
            processor.process_text(f"llm-{next(self._ids)}", text, checked, "prompts")
            for text in as_prompts(prompts)
        ]
        return requests, self._run_pooling(requests, use_tqdm)

    def _pooling_processor(self) -> PoolingInputProcessor:
        if not isinstance(self._input_processor, PoolingInputProcessor):
            raise InvalidRequestError(
                "this model generates text; for embeddings, load it with runner='pooling'.",
                field="model",
            )
        return self._input_processor

    def _run_pooling(
        self, requests: Sequence[EngineCoreRequest], use_tqdm: bool
    ) -> list[PooledOutput]:
        """Run requests to their ends; `LLM` does."""
        raise NotImplementedError


def _result(request: EngineCoreRequest, outputs: Any) -> PoolingRequestOutput[Any]:
    return PoolingRequestOutput(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        outputs=outputs,
    )


def _numbers(output: PooledOutput) -> list[float] | list[list[float]]:
    return to_numbers(output) if len(output.shape) == 1 else to_rows(output)


def _as_list(texts: str | Sequence[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)
