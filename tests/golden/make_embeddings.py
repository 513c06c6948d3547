"""Tiny random embedding models and a reranker as sentence-transformers writes them, with the vectors and scores that it and transformers give.

Run with a Python that has torch, transformers 5.23 and sentence-transformers 6.2; writes embeddings/<name>/: the checkpoint, and reference.json.
"""

import json, pathlib, shutil, string
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

out = pathlib.Path(__file__).parent / "embeddings"
SPECIAL = ["<pad>", "<bos>", "<eos>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["<think>", "</think>", "yes", "no"]
CHARACTERS = [*SPECIAL, *sorted(set(string.printable) - set("\t\r\x0b\x0c"))]
VOCAB = len(CHARACTERS) + len(WORDS)
TEXTS = [
    "cat",
    "The capital of China is Beijing.",
    "Gravity is a force that attracts two bodies towards each other. " * 2,
    "x" * 150,
    "a b",
    "Nothing of that kind was ever said about it.",
]
QUERY, DOCUMENTS = (
    "What is the capital of China?",
    ["Beijing is the capital.", "Gravity attracts bodies.", "x", "The capital of China is Beijing, and that of France is Paris."],
)
small = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=True,
)


def tokenizer(template):
    t = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(CHARACTERS)}, merges=[], unk_token="<pad>"))
    t.decoder = decoders.Fuse()
    t.add_special_tokens(SPECIAL)
    t.add_tokens([AddedToken(w, normalized=False) for w in WORDS])
    if template:
        t.post_processor = processors.TemplateProcessing(single=template, special_tokens=[(s, i) for i, s in enumerate(SPECIAL)])
    return PreTrainedTokenizerFast(tokenizer_object=t, pad_token="<pad>", eos_token="<|im_end|>", padding_side="left")


def randomize(model, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2:
                p.normal_(0, 0.15)
            elif "norm" in name:
                p.add_(torch.randn_like(p) * 0.1)
    return model.float().eval()


def sentence_model(name, template, config, prompts, modules, seed):
    plain, folder = out / (name + ".plain"), out / name
    for each in (plain, folder):
        shutil.rmtree(each, ignore_errors=True)
    randomize(AutoModel.from_config(config, attn_implementation="eager"), seed).save_pretrained(plain)
    tokenizer(template).save_pretrained(plain)
    body = Transformer(str(plain), model_kwargs=dict(attn_implementation="eager", dtype=torch.float32))
    torch.manual_seed(seed + 1)
    model = SentenceTransformer(modules=[body, *modules], prompts=prompts, device="cpu")
    model.save(str(folder), create_model_card=False)
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs=dict(attn_implementation="eager"))
    kinds = {kind: dict(prompt_name=kind) for kind in prompts}
    vectors = {kind: model.encode(TEXTS, **how).astype(float).round(7).tolist() for kind, how in {"none": dict(prompt=""), **kinds}.items()}
    short = model.encode(TEXTS, prompt="", truncate_dim=8, normalize_embeddings=True).astype(float).round(7).tolist()
    ids = [model.tokenizer(text)["input_ids"] for text in TEXTS]
    write(folder, dict(texts=TEXTS, ids=ids, vectors=vectors, first_8=short))
    shutil.rmtree(plain)


def write(folder, reference):
    (folder / "reference.json").write_text(json.dumps(reference, separators=(",", ":")) + "\n")
    print(
        folder.name,
        sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) // 1024,
        "KiB",
        sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()),
    )


def reranker(seed):
    """The recipe on the page of Qwen3-Reranker-0.6B."""
    folder = out / "reranker"
    shutil.rmtree(folder, ignore_errors=True)
    config = AutoConfig.for_model("qwen3", **{**small, "max_position_embeddings": 1024}, num_hidden_layers=2)
    model = randomize(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), seed)
    model.save_pretrained(folder)
    tokenizer(None).save_pretrained(folder)
    tok = AutoTokenizer.from_pretrained(folder)
    prefix = '<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    instruction = "Given a web search query, retrieve relevant passages that answer the query"
    yes, no = tok.convert_tokens_to_ids("yes"), tok.convert_tokens_to_ids("no")
    scores, ids = [], []
    for document in DOCUMENTS:
        pair = f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}"
        tokens = [t for part in (prefix, pair, suffix) for t in tok.encode(part, add_special_tokens=False)]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        scores.append(torch.softmax(logits[[no, yes]], -1)[1].item())
        ids.append(tokens)
    write(folder, dict(query=QUERY, documents=DOCUMENTS, ids=ids, scores=scores))


sentence_model(
    "last",
    "$A <|endoftext|>",
    AutoConfig.for_model("qwen3", **small, num_hidden_layers=2),
    dict(query="Instruct: Find the answer\nQuery:", document=""),
    [Pooling(32, "lasttoken"), Normalize()],
    3,
)
gemma = AutoConfig.for_model(
    "gemma3_text",
    **small,
    num_hidden_layers=3,
    query_pre_attn_scalar=16,
    sliding_window=24,
    use_bidirectional_attention=True,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
)
sentence_model(
    "mean",
    "<bos> $A <eos>",
    gemma,
    dict(query="task: search result | query: ", document="title: none | text: "),
    [
        Pooling(32, "mean"),
        Dense(32, 48, bias=False, activation_function=torch.nn.Identity()),
        Dense(48, 24, bias=True, activation_function=torch.nn.Tanh()),
        Normalize(),
    ],
    5,
)
reranker(7)
