"""Encoders without a folder of sentence-transformers: vectors are means of their tokens, whatever pads a text."""

import pytest
import tiny_huggingface as tiny
import torch
import transformers

from headway_export.huggingface import FolderOptions, from_folder
from headway_server.bundles import Task


@pytest.mark.parametrize("family", ["gte", "jina_embeddings_v3", "eurobert"])
def test_vectors_are_the_means_of_transformers(tmp_path, family):
    config = transformers.AutoConfig.for_model(family, **tiny.SIZES, mask_token_id=3)
    torch.manual_seed(7)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    tiny.write_tokenizer(tmp_path)
    source, _ = from_folder(tmp_path, FolderOptions(task=Task.TEXT_EMBEDDING, pooling="mean"))
    own = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = torch.tensor([[1, 9, 12, 30, 2], [1, 41, 2, 0, 0]])
    mask = (ids != 0).long()
    with torch.inference_mode():
        found = source.module(ids, mask)["embedding"]
        for row, length in enumerate(mask.sum(1).tolist()):
            alone = own(input_ids=ids[row : row + 1, :length], return_dict=True).last_hidden_state[0].mean(0)
            torch.testing.assert_close(found[row], alone, rtol=0, atol=1e-5)
