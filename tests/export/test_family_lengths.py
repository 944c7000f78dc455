"""Families of Hugging Face `transformers`: training and export read the same lengths, and a text of that length runs.

Each family is tried with a tiny model of one layer.
"""

import pytest
import tiny_families
import tiny_huggingface as tiny
import torch
import transformers

from headway_export.errors import SourceError
from headway_export.huggingface import FolderOptions, from_folder
from headway_training.errors import CheckpointError, RecipeError
from headway_training.huggingface import open_folder
from headway_training.optimization import layer_matrices, make_optimizers
from headway_training.positions import _Probe, position_tables
from headway_training.recipes import OptimizationSettings

TASK = "text_classification"
FAMILIES = [one for one in tiny_families.ENCODERS if one not in tiny_families.NOT_TINY]
REFUSED = {
    "canine": "canine states no vocab_size",
    "mra": "mra attends by a kernel for CUDA",
}
"""Families that do not read texts of tokens alone, and what is said of them."""
UNEVEN = {"funnel", "reformer"}
"""Families that read padding: trained, and not exported."""
READ_MORE = {
    "layoutlm": "bbox beside tokens, which no call gives",
    "layoutlmv3": "the image of a page beside its words and boxes, and no call gives",
    "lilt": "bbox beside tokens, which no call gives",
    "markuplm": "xpath_tags_seq, xpath_subs_seq beside tokens, which no call gives",
    "roc_bert": "input_shape_ids, input_pronunciation_ids beside tokens, which no call gives",
}
"""Families that read more of a text than its tokens: trained on texts alone, they are exported, others are not."""
LABELS = ("LABEL_0", "LABEL_1", "LABEL_2")
"""Those of the folders, so that heads are kept."""


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def train_and_export(folder):
    """The model that is trained, and the module that is exported."""
    opened = open_folder(folder, TASK)
    source, _ = from_folder(folder, FolderOptions(task=TASK))
    return opened, opened.build(LABELS).eval(), source.module


def test_the_families_are_those_of_the_library():
    assert set(tiny_families.NOT_TINY) <= set(tiny_families.ENCODERS)
    assert len(FAMILIES) > 40
    assert REFUSED.keys() | READ_MORE.keys() | UNEVEN <= set(FAMILIES)


@pytest.mark.parametrize("family", [*FAMILIES, *tiny_families.DECODERS_WITH_TABLES])
def test_training_and_export_read_a_text_of_the_same_most_length_or_refuse_the_family(tmp_path, family, monkeypatch):
    folder = tiny_families.write_family(tmp_path / family, family)
    if family in READ_MORE:
        with pytest.raises(SourceError, match=f"reads {READ_MORE[family]}"):
            from_folder(folder, FolderOptions(task=TASK))
        # As if it had been trained here, on texts alone.
        for module in ("families", "folder"):
            monkeypatch.setattr(f"headway_export.huggingface.{module}.checkpoint_beside", lambda _: True)
    if family in REFUSED:
        with pytest.raises(CheckpointError, match=REFUSED[family].replace("(", r"\(")):
            open_folder(folder, TASK).build(LABELS)
        with pytest.raises(SourceError, match=REFUSED[family].replace("(", r"\(")):
            from_folder(folder, FolderOptions(task=TASK))
        return
    if family in UNEVEN:
        assert open_folder(folder, TASK).build(LABELS).kind.endswith("ForSequenceClassification")
        with pytest.raises(SourceError, match="answers a text otherwise where it is padded"):
            from_folder(folder, FolderOptions(task=TASK))
        return
    opened, trained, exported = train_and_export(folder)
    assert opened.max_length == exported.max_length
    assert 40 < opened.max_length <= tiny_families.LENGTH
    length = opened.max_length
    ids = torch.randint(10, 70, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0
    ids[1, length // 2 :] = opened.special_tokens.pad
    with torch.inference_mode():
        logits = trained(ids, mask)
        torch.testing.assert_close(exported(ids, mask), logits)
    assert logits.shape == (2, 3)
    assert logits.isfinite().all()
    with pytest.raises(RecipeError, match=f"takes at most {opened.max_length} tokens"):
        open_folder(folder, TASK, opened.max_length + 1)
    with pytest.raises(SourceError, match=f"the model takes {opened.max_length} tokens"):
        from_folder(folder, FolderOptions(task=TASK, max_length=opened.max_length + 1))


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        ("yoso", {"use_expectation": False}, "yoso attends by a kernel for CUDA"),
        ("nystromformer", {"segment_means_seq_len": 512}, "reads texts of exactly 512 tokens"),
        ("xmod", {"default_language": None}, "write default_language into config.json, one of en_XX, de_DE"),
    ],
)
def test_a_configuration_by_which_no_text_is_read_is_refused_by_training_and_export(tmp_path, family, values, words):
    config = tiny_families.tiny_config(family)
    for name, value in values.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        open_folder(tmp_path, TASK)
    with pytest.raises(SourceError, match=words):
        from_folder(tmp_path, FolderOptions(task=TASK))


def test_an_embedder_that_reads_more_than_tokens_is_refused_too(tmp_path):
    folder = tiny_families.write_family(tmp_path / "layoutlm", "layoutlm")
    with pytest.raises(SourceError, match="LayoutLMModel reads bbox beside tokens, which no call gives"):
        from_folder(folder, FolderOptions(task="text_embedding", pooling="mean"))


@pytest.mark.parametrize(("stated", "expected"), [(None, 0), (3, 3)])
def test_a_decoder_that_classifies_finds_the_end_of_a_text_by_what_fills_up_a_batch(tmp_path, stated, expected):
    folder = tiny.write_model(tmp_path / "gpt2", "gpt2", "ForSequenceClassification", pad_token_id=stated, num_labels=2)
    tiny.write_tokenizer(folder)  # whose own token is 0
    opened = open_folder(folder, TASK)
    assert opened.special_tokens.pad == expected
    model = opened.build(LABELS[:2]).eval()
    alone = torch.tensor([[20, 21, 22]])
    padded = torch.tensor([[20, 21, 22, expected, expected], [30, 31, 32, 33, 34]])
    mask = (padded != expected).long()
    with torch.inference_mode():
        torch.testing.assert_close(model(padded, mask)[:1], model(alone, torch.ones_like(alone)))
    model.write(tmp_path / "written")
    source, _ = from_folder(tmp_path / "written", FolderOptions(task=TASK))
    assert source.special_tokens.pad == expected


# Tables of positions, by whatever name


def tables_that_are_looked_up(model):
    """The weights that a model looks up by positions, by their names: of a text, and row after row."""
    probe = _Probe()
    ids = torch.arange(60, 68)[None]  # of no use as positions
    with probe, torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = set()
    for table, rows in probe.looked_up:
        flat = rows.flatten()[:8]
        if len(flat) == 8 and torch.equal(flat - flat[0], torch.arange(8)) and flat[0] < 20 and id(table) in names:
            found.add(names[id(table)])
    return found


@pytest.mark.parametrize(
    "family", [*(one for one in FAMILIES if one not in REFUSED), *tiny_families.DECODERS_WITH_TABLES]
)
def test_every_table_that_is_looked_up_by_positions_is_told_by_its_name(family):
    config = tiny_families.tiny_config(family)
    model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    found = tables_that_are_looked_up(model)
    assert found <= position_tables(model).keys()
    learned = {name for name, one in position_tables(model).items() if one.requires_grad}
    made = make_optimizers(model, OptimizationSettings(epochs=1, weight_decay=0.5))
    decayed = {id(one) for group in made[0].param_groups if group["weight_decay"] for one in group["params"]}
    parameters = dict(model.named_parameters())
    assert not {name for name in learned if id(parameters[name]) in decayed}
    assert not layer_matrices(model).keys() & learned


def test_gpt2s_positions_are_neither_decayed_nor_moved_by_muon():
    model = transformers.AutoModelForCausalLM.from_config(tiny_families.tiny_config("gpt2"))
    assert position_tables(model).keys() == {"transformer.wpe.weight"}
    made = make_optimizers(model, OptimizationSettings(epochs=1, weight_decay=0.5, optimizer="muon"))
    decays = {id(one): group["weight_decay"] for part in made for group in part.param_groups for one in group["params"]}
    assert decays[id(model.transformer.wpe.weight)] == 0
    assert decays[id(model.transformer.wte.weight)] == 0.5


def test_projections_of_positions_are_no_tables():
    config = tiny_families.tiny_config("deberta")
    config.relative_attention, config.pos_att_type = True, ["p2c", "c2p"]
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    names = position_tables(model).keys()
    assert {"deberta.embeddings.position_embeddings.weight", "deberta.encoder.rel_embeddings.weight"} == names
    assert any("pos_proj" in name for name, _ in model.named_parameters())
