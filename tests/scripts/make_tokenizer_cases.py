#!/usr/bin/env python3
"""Write fixtures/tokenizer/wordpiece.json, characters.json, unigram.json and unigram.gguf: small vocabularies trained on
our documents, and the ids of the original implementations for the texts of fixtures/tokenizer/pretokenizer.json.

    pip install tokenizers==0.23.3 sentencepiece==0.2.3 protobuf gguf
    python3 tests/scripts/make_tokenizer_cases.py

Run it from the root of the repository, after make_pretokenizer_cases.py. WordPiece (its pieces
spelled as in GGUF) and character BPE are by Hugging Face tokenizers; Unigram is by SentencePiece.
"""

import io
import json
from pathlib import Path

import gguf
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

FOLDER = Path("fixtures/tokenizer")
TEXTS = json.loads((FOLDER / "pretokenizer.json").read_text())["texts"] + [
    "ＦＵＬＬ width ｶﾞ ﾊﾟ ①② ㎏ ﷺ ﬁ Å Å a\u0301\u0323 e\u0301e ệ 가각 \ufb2c", "x" * 99 + " " + "x" * 100 + " " + "x" * 101,
    "▁already ▁▁escaped a▁b", "\0zero\x01one\x0btwo\x0cthree\x85four\u2028five\u200bsix\ufffdseven", "  <tool> a <tool>b  ",
    "İıſẞßΣς ǅ ǆ K Ω ; ` \u1fef 豈 㐀 \U0002b820 \U0002b920 \U0002f801", " ", "   ", "\t\n", "𝔘𝔫𝔦 ｈｅｌｌｏ ™ ½ … ‥"]
CORPUS = [p.read_text() for p in (Path("README.md"), Path("ARCHITECTURE.md"), Path("SECURITY.md"))] + TEXTS
LINES = [line for text in CORPUS for line in text.splitlines() if line.strip()]


def wordpiece(lowercase: bool, strip_accents: bool) -> dict:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    # the last texts have characters outside the vocabulary
    trainer = trainers.WordPieceTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(LINES[:-12], trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    spell = lambda piece: piece[2:] if piece.startswith("##") else piece if piece in special else "▁" + piece
    return {"lowercase": lowercase, "strip_accents": strip_accents, "tokens": [spell(piece) for piece, _ in by_id],
            "ids": [tokenizer.encode(text).ids for text in TEXTS]}


def characters(pre: str, cut, spaces: bool, fallback: bool) -> dict:
    def tokenizer(model):
        out = Tokenizer(model)
        if spaces:
            out.normalizer = normalizers.Replace(" ", "▁")
        out.pre_tokenizer = cut
        return out

    special = ["<unk>", "<s>", "</s>", "<mask>"]
    trained = tokenizer(models.BPE(unk_token="<unk>"))
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False, max_token_length=12)
    trained.train_from_iterator(LINES[:-12] if spaces else " ".join(LINES[:-12]).split(), trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    tokens = special + ([f"<0x{byte:02X}>" for byte in range(256)] if fallback else []) + pieces[len(special):]
    vocab = {piece: i for i, piece in enumerate(tokens)}
    merges = [tuple(merge) for merge in model["merges"]]
    final = tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=fallback))
    types = [2, 3, 3, 3] + [6] * 256 * fallback
    return {"pre": pre, "tokens": tokens, "types": types + [1] * (len(tokens) - len(types)),
            "merges": [" ".join(merge) for merge in merges], "ids": [final.encode(text).ids for text in TEXTS]}


def unigram(rule: str, prefix: bool, tidy: bool, fallback: bool) -> tuple[dict, bytes]:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES[:-12]), model_writer=out, model_type="unigram", vocab_size=900 if fallback else 600,
        normalization_rule_name=rule, add_dummy_prefix=prefix, remove_extra_whitespaces=tidy, byte_fallback=fallback,
        character_coverage=0.98, hard_vocab_limit=False, minloglevel=2)
    processor = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    proto = sentencepiece_model_pb2.ModelProto.FromString(out.getvalue())
    case = {"prefix": prefix, "tidy": tidy, "tokens": [p.piece for p in proto.pieces],
            "scores": [p.score for p in proto.pieces], "types": [int(p.type) for p in proto.pieces],
            "ids": [processor.encode(text) for text in TEXTS]}
    return case, proto.normalizer_spec.precompiled_charsmap


def main() -> None:
    cases = [wordpiece(True, True), wordpiece(False, False), wordpiece(True, False)]
    (FOLDER / "wordpiece.json").write_text(json.dumps({"texts": TEXTS, "cases": cases}, separators=(",", ":")) + "\n")

    lines = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    cases = [characters("gemma4", lines, True, True), characters("sarvam-moe", lines, True, False),
             characters("whitespace", pre_tokenizers.WhitespaceSplit(), False, False)]
    (FOLDER / "characters.json").write_text(json.dumps({"texts": TEXTS, "cases": cases}, separators=(",", ":")) + "\n")

    case, charsmap = unigram("nmt_nfkc", True, True, True)
    writer = gguf.GGUFWriter(str(FOLDER / "unigram.gguf"), "t5")
    writer.add_tokenizer_model("t5")
    writer.add_token_list(case.pop("tokens"))
    writer.add_token_scores(case.pop("scores"))
    writer.add_token_types(case.pop("types"))
    writer.add_add_space_prefix(case["prefix"])
    writer.add_remove_extra_whitespaces(case["tidy"])
    writer.add_precompiled_charsmap(charsmap)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    others = [unigram("identity", True, True, False)[0], unigram("identity", False, False, True)[0],
              unigram("identity", True, False, False)[0]]
    cases = {"texts": TEXTS, "file": case, "cases": others}
    (FOLDER / "unigram.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")


main()
