"""Train the tiny tokenizers of the ChatGLM golden checkpoints, in the file layouts of the originals.

    python tests/golden/make_chatglm_tokenizers.py             writes the tokenizer files of the four chatglm* folders
    python tests/golden/make_chatglm_tokenizers.py --check     compares instead of writing

The same version of sentencepiece gives the same bytes. Needs sentencepiece and protobuf.

ChatGLM-6B: ice_text.model, a unigram model whose own pieces (<unk>, <s>, </s>, <pad>, <n>, then learned ones) are followed by
the control tokens, the tokens of white space and the 256 bytes. A token's id is the piece's plus num_image_tokens.
ChatGLM2, ChatGLM3: tokenizer.model, a BPE model with bytes; the control tokens have no pieces, their ids follow the last one.
"""

import argparse
import io
import json
import pathlib
import tempfile

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

FOLDER = pathlib.Path(__file__).resolve().parent

V1_SPECIAL = ["[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>", "<ENC>", "<dBLOCK>"]
V1_BLANKS = ["<|tab|>"] + [f"<|blank_{length}|>" for length in range(2, 81)]
# The original has 20000 of them, for pictures that ChatGLM-6B never learnt; an odd few show whether they are counted.
V1_NUM_IMAGE_TOKENS = 5
V1_LEARNED = 245  # pieces of ice_text.model before the control tokens
V2_SPECIAL = ["[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"]
V3_SPECIAL = V2_SPECIAL + ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
V2_PIECES = 409  # of tokenizer.model: 3 named, 256 bytes, letters and merges

TEXT = """\
The river was high after three days of rain.
She opened the window and listened to the birds in the garden.
How many apples are left in the basket?
There are seven apples, and two of them are green.
Please write a short letter to my grandmother.
The train to the coast leaves at a quarter past nine.
He could not find his glasses because he was wearing them.
What is the capital of the country where you were born?
Water boils at one hundred degrees at the level of the sea.
A good answer is short, true and easy to check.
The cat sleeps on the warm stones in front of the house.
Tell me a story about a fox and a bear who share a boat.
Every morning the baker sells bread before the sun comes up.
We walked along the beach until the lights of the town were gone.
You can sort a list by the length of its words.
The teacher asked the children to count from one to twenty.
I think that the weather will be better tomorrow.
The moon is smaller than the earth and has no air.
If you mix blue and yellow paint, you get green.
Her brother plays the violin, and his friends play the drums.
The answer to the last question was wrong, so she tried again.
Where did you put the key of the red box?
It takes about two hours to walk around the lake.
They planted a tree for every child in the village.
This is a test of the tokenizer, and this is the end of the test.
[Round 0]
[Round 1]
[Round 2]
你好，请问今天的天气怎么样？
今天的天气很好，我们去公园走走吧。
我是一个学生，我在学校学习中文。
请用三句话介绍一下你自己。
这本书是我的，那本书是他的。
你能告诉我火车站在哪里吗？
小猫在门口睡觉，小狗在院子里玩。
他每天早上六点起床，然后去跑步。
水果里有很多对人体有好处的东西。
我们明天一起去看电影，好不好？
老师说这个问题的答案不对。
春天来了，花开了，天也不冷了。
问：一年有多少个月？
答：一年有十二个月。
问：你是谁？
答：我是一个很小的模型。
for i in range(10): print(i)
def add(a, b): return a + b
if x == 0: x = x + 1
import numpy as np
while True: break
int main() { return 0; }
"""
# What ChatGLM-6B's files write as an ASCII sign: its answers are known for "," in Chinese, which chat() turns back.
V1_RULES = {"，": ",", "！": "!", "：": ":", "；": ";", "？": "?"}


def train(model_type, num_pieces, **settings):
    """Train on TEXT and return the model, a ModelProto."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=model,
        model_type=model_type,
        vocab_size=num_pieces,
        num_threads=1,
        remove_extra_whitespaces=False,
        split_digits=True,
        num_sub_iterations=2,
        minloglevel=1,
        **settings,
    )
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    proto.ClearField("denormalizer_spec")
    return proto


def make_v1(scratch):
    """Return the bytes of ice_text.model."""
    rules = scratch / "rules.tsv"
    rules.write_text("".join(f"{ord(old):X}\t{ord(new):X}\n" for old, new in V1_RULES.items()), encoding="utf-8")
    proto = train(
        "unigram",
        V1_LEARNED,
        pad_id=3,
        user_defined_symbols=["<n>"],
        character_coverage=0.98,
        normalization_rule_tsv=str(rules),
    )
    proto.normalizer_spec.ClearField("normalization_rule_tsv")  # a path; the rules are in precompiled_charsmap
    kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
    proto.pieces.extend(kinds(piece=token, score=0.0, type=kinds.CONTROL) for token in V1_SPECIAL)
    proto.pieces.extend(kinds(piece=token, score=0.0, type=kinds.USER_DEFINED) for token in V1_BLANKS)
    proto.pieces.extend(kinds(piece=f"<0x{value:02X}>", score=0.0, type=kinds.BYTE) for value in range(256))
    proto.trainer_spec.byte_fallback = True
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return proto.SerializeToString(deterministic=True)


def make_v2():
    """Return the bytes of tokenizer.model, for ChatGLM2 and ChatGLM3."""
    proto = train("bpe", V2_PIECES, byte_fallback=True, character_coverage=0.98, normalization_rule_name="identity")
    return proto.SerializeToString(deterministic=True)


def make_files(scratch):
    """Return path -> bytes, paths relative to FOLDER."""
    auto_map = {"AutoTokenizer": ["tokenization_chatglm.ChatGLMTokenizer", None]}  # remote code, which is not there
    v1_config = {
        "name_or_path": "THUDM/chatglm-6b",
        "bos_token": "<sop>",
        "eos_token": "<eop>",
        "end_token": "</s>",
        "gmask_token": "[gMASK]",
        "mask_token": "[MASK]",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "remove_space": False,
        "do_lower_case": False,
        "tokenizer_class": "ChatGLMTokenizer",
        "num_image_tokens": V1_NUM_IMAGE_TOKENS,
        "auto_map": auto_map,
    }
    v2_config = {
        "name_or_path": "THUDM/chatglm2-6b",
        "remove_space": False,
        "do_lower_case": False,
        "tokenizer_class": "ChatGLMTokenizer",
        "auto_map": auto_map,
    }
    v1_model, v2_model = make_v1(scratch), make_v2()
    models = {"chatglm6b": v1_model, "chatglm6b_bin": v1_model, "chatglm2": v2_model, "chatglm3": v2_model}
    configs = {
        "chatglm6b": v1_config,
        "chatglm6b_bin": v1_config,
        "chatglm2": v2_config,
        "chatglm3": v2_config | {"name_or_path": "THUDM/chatglm3-6b"},
    }
    files = {}
    for folder, model in models.items():
        files[f"{folder}/{'ice_text.model' if folder.startswith('chatglm6b') else 'tokenizer.model'}"] = model
        files[f"{folder}/tokenizer_config.json"] = (json.dumps(configs[folder], indent=2) + "\n").encode()
    return files


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is there instead of writing")
    is_check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        files = make_files(pathlib.Path(scratch))
    for name, content in files.items():
        path = FOLDER / name
        if is_check:
            assert path.read_bytes() == content, name
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
    if is_check:
        print("the same")


if __name__ == "__main__":
    main()
