"""Results of a call, with those of sentences joined."""

from __future__ import annotations

from collections.abc import Sequence as Elements
from dataclasses import dataclass
from itertools import pairwise

from headway_server.decoding.sequence import FinishReason, Hypothesis, SequenceResult
from headway_server.preprocessing import SplitText, TextTokenizer
from headway_server.tasks.text_to_text.alignment import Alignment, align
from headway_server.tasks.text_to_text.call import Source
from headway_server.tasks.text_to_text.request import TextToTextPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenHypothesis:
    """One of several outputs for a text."""

    text: str
    log_probability: float
    score: float
    finish_reason: FinishReason
    num_new_tokens: int
    alignment: Alignment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenText:
    """Result of one text."""

    text: str
    log_probability: float
    """Sum over all tokens, of all sentences if the text is split."""
    score: float
    finish_reason: FinishReason
    num_source_tokens: int
    num_new_tokens: int
    truncated: bool
    hypotheses: tuple[WrittenHypothesis, ...] = ()
    """All hypotheses, the best (this one) first; empty unless several are requested."""
    alignments: tuple[Alignment, ...] = ()
    """One for each sentence, if requested."""
    seed: int | None = None
    """Seed of the sampling, if tokens are sampled."""
    num_sentences: int = 1


def read_result(
    source: Source, result: SequenceResult, *, plan: TextToTextPlan, tokenizer: TextTokenizer
) -> WrittenText:
    """Makes the result of one source from the engine's.

    Args:
        source: Source of the sequence.
        result: Result of the engine.
        plan: Parameters of the call.
        tokenizer: Tokenizer of the model.
    """
    hypotheses = tuple(
        _read_hypothesis(source, hypothesis, plan, tokenizer) for hypothesis in result.hypotheses[: plan.num_hypotheses]
    ) or (
        WrittenHypothesis(
            text=result.output,
            log_probability=result.log_probability,
            score=plan.score(result.log_probability, result.num_new_tokens),
            finish_reason=result.finish_reason,
            num_new_tokens=result.num_new_tokens,
        ),
    )
    best = hypotheses[0]
    return WrittenText(
        text=best.text,
        log_probability=best.log_probability,
        score=best.score,
        finish_reason=best.finish_reason,
        num_source_tokens=source.reading.source.cost,
        num_new_tokens=best.num_new_tokens,
        truncated=source.reading.truncated,
        hypotheses=hypotheses if plan.num_hypotheses > 1 else (),
        alignments=() if best.alignment is None else (best.alignment,),
        seed=source.seed if plan.is_sampled else None,
    )


def _read_hypothesis(
    source: Source, hypothesis: Hypothesis, plan: TextToTextPlan, tokenizer: TextTokenizer
) -> WrittenHypothesis:
    # A required phrase is tokenized as after a space, and may be at the very beginning.
    num_spaces = 1 if source.phrases.required and hypothesis.output.startswith(" ") else 0
    alignment = None
    if hypothesis.alignment is not None:
        alignment = align(
            source_spans=source.reading.spans(),
            target_text=hypothesis.output,
            target_ids=hypothesis.token_ids,
            attention=hypothesis.alignment,
            tokenizer=tokenizer,
        ).shifted(source=0, target=-num_spaces)
    return WrittenHypothesis(
        text=hypothesis.output[num_spaces:],
        log_probability=hypothesis.log_probability,
        score=plan.score(hypothesis.log_probability, hypothesis.num_new_tokens),
        finish_reason=hypothesis.finish_reason,
        num_new_tokens=hypothesis.num_new_tokens,
        alignment=alignment,
    )


def join_sentences(split: SplitText, translations: Elements[WrittenText]) -> WrittenText:
    """Joins the translations of the sentences of a text, at least one."""
    text, starts = split.join([translation.text for translation in translations])
    alignments = [
        alignment.shifted(source=sentence.start, target=start)
        for sentence, start, translation in zip(split.sentences, starts, translations, strict=True)
        for alignment in translation.alignments
    ]
    ends = {translation.finish_reason for translation in translations}
    return WrittenText(
        text=text,
        log_probability=sum(translation.log_probability for translation in translations),
        score=sum(translation.score for translation in translations),
        finish_reason=FinishReason.LENGTH if FinishReason.LENGTH in ends else translations[0].finish_reason,
        num_source_tokens=sum(translation.num_source_tokens for translation in translations),
        num_new_tokens=sum(translation.num_new_tokens for translation in translations),
        truncated=any(translation.truncated for translation in translations),
        alignments=tuple(alignments),
        seed=translations[0].seed,
        num_sentences=len(translations),
    )


def regroup(translations: Elements[WrittenText], splits: Elements[SplitText]) -> list[WrittenText]:
    """Joins the translations of sentences, in order, to translations of their texts."""
    bounds = [0]
    for split in splits:
        bounds.append(bounds[-1] + len(split.sentences))
    return [
        join_sentences(split, translations[start:stop])
        for split, (start, stop) in zip(splits, pairwise(bounds), strict=True)
    ]
