"""Answers with tool calls and thoughts: recorded ones, examples of model cards, and what chat templates write.

A recorded answer is a model's own. A template's is how it writes a call of the assistant: what models are trained on.
"""

from typing import NamedTuple


class Answer(NamedTuple):
    """An answer and what is in it. opened: whether the prompt has opened the thoughts."""

    parser: str
    source: str
    text: str
    calls: list[tuple[str, dict]]
    content: str = ""
    reasoning: str = ""
    thoughts: str = ""
    opened: bool = False


CITY, UNIT = {"type": "string"}, {"type": "string", "enum": ["celsius", "fahrenheit"]}
TOOLS = {
    "get_weather": {"type": "object", "properties": {"city": CITY, "unit": UNIT}, "required": ["city"]},
    "add": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    "note": {"type": "object", "properties": {"text": {"type": "string"}, "tags": {"type": "array"}}},
    "now": {},
}
PARIS, SUM = ("get_weather", {"city": "Paris"}), ("add", {"a": 17, "b": 25})
WANT = [("get_weather", {"city": "Paris", "unit": "celsius"})]
BOTH = [PARIS, SUM]
SMOLLM2 = (
    "You can call the function with the number of the desired output:\n\n```\nadd_25_and_17_to_25 = "
    "add_25_and_17_to_25\n```\n\nThis will return 22."
)
QWEN = "Qwen2.5-Coder-{}B-Instruct, q4_k_m, greedy, recorded"
ANSWERS = {
    "qwen bare": Answer("hermes", QWEN.format("0.5"),
        '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}', WANT),
    "qwen fenced": Answer("hermes", QWEN.format("1.5"),
        '```json\n{\n  "name": "add",\n  "arguments": {\n    "a": 17,\n    "b": 25\n  }\n}\n```', [SUM]),
    "qwen no call": Answer("hermes", QWEN.format("1.5"),
        "```python\ndef add(a, b):\n    return a + b\n```", [], "```python\ndef add(a, b):\n    return a + b\n```"),
    "smollm2 no call": Answer("hermes", "SmolLM2-135M-Instruct, greedy, recorded, told of tools in words",
        SMOLLM2, [], SMOLLM2),
    "hermes": Answer("hermes", "template of Qwen2.5, Qwen3 and Hermes 3",
        'Both.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>', BOTH, "Both."),
    "qwen3": Answer("hermes", "template of Qwen3",
        '<think>\nThe sum < 50.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [("now", {})], reasoning="The sum < 50.", thoughts="qwen3"),
    "ernie": Answer("hermes", "tests of transformers, an answer of ERNIE 4.5",
        "The user is asking about the weather in Paris today. I need to call this tool.\n</think>\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n', [PARIS],
        reasoning="The user is asking about the weather in Paris today. I need to call this tool.",
        thoughts="ernie45", opened=True),
    "gemma 3": Answer("gemma", "Google's guide to function calling with Gemma 3",
        '```tool_code\nget_weather(city="Paris")\n```', [PARIS]),
    "qwen3 coder": Answer("qwen3_coder", "template of Qwen3-Coder",
        "Look.\n\n<tool_call>\n<function=note>\n<parameter=text>\na <b>\n\n  c\n</parameter>\n<parameter=tags>\n"
        '["x", "y"]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=a>\n17\n'
        "</parameter>\n<parameter=b>\n25\n</parameter>\n</function>\n</tool_call>",
        [("note", {"text": "a <b>\n\n  c", "tags": ["x", "y"]}), SUM], "Look."),
    "seed-oss": Answer("seed_oss", "template of Seed-OSS",
        "<seed:think>Two.</seed:think>\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "</function>\n</seed:tool_call>", [PARIS], reasoning="Two.", thoughts="seed_oss"),
    "seed-oss list": Answer("seed_oss", "template of Seed-OSS, which writes lists and null as Python",
        "<seed:tool_call>\n<function=note>\n<parameter=text>x</parameter>\n<parameter=tags>['y', None]</parameter>\n"
        "</function>\n</seed:tool_call>", [("note", {"text": "x", "tags": ["y", None]})]),
    "llama 3.1": Answer("llama3_json", "prompt format of Llama 3.1, documented by Meta",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    "llama 3.1 several": Answer("llama3_json", "documentation of vLLM's parser",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "add", "parameters": {"a": 17, "b": 25}}', BOTH),
    "llama 3.1 custom": Answer("llama3_json", "custom tools of Llama 3.1, documented by Meta",
        '<function=get_weather>{"city": "Paris"}</function>', [PARIS]),
    "llama 4": Answer("llama4_pythonic", "prompt format of Llama 4, documented by Meta",
        '<|python_start|>[get_weather(city="Paris"), add(a=17, b=25)]<|python_end|>', BOTH),
    "llama 3.2": Answer("pythonic", "prompt format of Llama 3.2, documented by Meta",
        "[get_weather(city='Paris'), add(a=17, b=25)]", BOTH),
    "lfm2": Answer("pythonic", "template of LFM2.5",
        "<|tool_call_start|>[get_weather(city='Paris'), note(text='(\\'a]', tags=[\"x\", null])]<|tool_call_end|>",
        [PARIS, ("note", {"text": "('a]", "tags": ["x", None]})]),
    "mistral": Answer("mistral", "template of Mistral Small 3.1",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}, '
        '{"name": "add", "arguments": {"a": 17, "b": 25}, "id": "123456789"}]', BOTH),
    "mistral v13": Answer("mistral", "template of Magistral and Devstral 2507",
        '[THINK]Both.[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]add[ARGS]{"a": 17, "b": 25}',
        BOTH, reasoning="Both.", thoughts="mistral"),
    "granite 3": Answer("granite", "template of Granite 3.2",
        'Here is my thought process:\nEasy.\nHere is my response:\n<|tool_call|>[{"name": "now", "arguments": {}}]',
        [("now", {})], reasoning="Easy.", thoughts="granite"),
    "phi-4-mini": Answer("phi4_mini_json", "documentation of Phi-4-mini",
        'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]', [PARIS]),
    "nemotron": Answer("nemotron", "template of Llama-3.3-Nemotron-Super",
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</TOOLCALL>', [PARIS]),
    "hunyuan": Answer("hunyuan_a13b", "documentation of vLLM's parser",
        '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>', [PARIS]),
    "minimax m1": Answer("minimax", "MiniMax's guide to function calling",
        '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_calls>', BOTH),
    "internlm": Answer("internlm", "template of InternLM 2.5",
        'I ask.<|action_start|><|plugin|>{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>',
        [PARIS], "I ask."),
    "command": Answer("cohere_command", "tests of transformers, an answer of Command A",
        '<|START_THINKING|>I should call a tool.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", '
        '"tool_name": "get_weather", "parameters": {"city": "Paris"}}\n]<|END_ACTION|>', [PARIS],
        reasoning="I should call a tool.", thoughts="cohere_command"),
    "deepseek v3": Answer("deepseek_v3", "template of DeepSeek-V3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n'
        '{"a": 17, "b": 25}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', BOTH),
    "deepseek v3.1": Answer("deepseek_v31", "template of DeepSeek-V3.1",
        "Both.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 17, "b": 25}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", BOTH, "Both."),
    "deepseek v3.2": Answer("deepseek_v32", "encoding of DeepSeek-V3.2",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="note">\n<｜DSML｜parameter name="text" string="true">17'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="tags" string="false">[1]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>", [("note", {"text": "17", "tags": [1]})]),
    "deepseek v4": Answer("deepseek_v4", "template of DeepSeek-V4",
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">17'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="false">25</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>", [SUM]),
    "deepseek r1": Answer("none", "template of DeepSeek-R1, which opens the thoughts in the prompt",
        "Paris is in France.\n</think>\n\nIt rains.", [], "It rains.", "Paris is in France.", "deepseek_r1", True),
    "kimi k2": Answer("kimi_k2", "Kimi K2's guide to tool calls",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.add:1 <|tool_call_argument_begin|>'
        '{"a": 17, "b": 25}<|tool_call_end|><|tool_calls_section_end|>', BOTH),
    "glm 4.6": Answer("glm45", "template of GLM 4.6",
        "\n<think>Both.</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris"
        "</arg_value>\n</tool_call>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>17</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>25</arg_value>\n</tool_call>", BOTH, "I look.", "Both.", "glm45"),
    "glm 4.7": Answer("glm47", "template of GLM 4.7",
        "<tool_call>now</tool_call><tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        [("now", {}), PARIS]),
    "minimax m2": Answer("minimax_m2", "template of MiniMax M2",
        'Both.\n</think>\n\n\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris'
        '</parameter>\n</invoke>\n<invoke name="add">\n<parameter name="a">17</parameter>\n<parameter name="b">25'
        "</parameter>\n</invoke>\n</minimax:tool_call>", BOTH, "", "Both.", "minimax_m2", True),
    "functiongemma": Answer("functiongemma", "Google's guide to FunctionGemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>", [PARIS]),
    "gemma 4": Answer("gemma4", "template of Gemma 4",
        '<|channel>thought\nBoth.<channel|><|tool_call>call:note{tags:[1,None,{k:<|"|>v<|"|>}],text:<|"|>a}, "b"<|"|>}'
        "<tool_call|><|tool_call>call:add{a:17,b:25}<tool_call|>",
        [("note", {"tags": [1, None, {"k": "v"}], "text": 'a}, "b"'}), SUM], "", "Both.", "gemma4"),
    "gpt-oss": Answer("openai", "tests of transformers, an answer of gpt-oss",
        "<|channel|>analysis<|message|>We will call function get_weather.<|end|><|start|>assistant<|channel|>"
        'commentary to=functions.get_weather <|constrain|>json<|message|>{\n  "city": "Paris"\n}', [PARIS],
        reasoning="We will call function get_weather."),
    "gpt-oss text": Answer("openai", "tests of transformers, an answer of gpt-oss",
        "<|channel|>analysis<|message|>User asks a simple math question: 2+2 = 4. Provide answer.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>4<|return|>", [], "4",
        "User asks a simple math question: 2+2 = 4. Provide answer."),
    "gpt-oss preamble": Answer("openai", "OpenAI's guide to Harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.add<|channel|>commentary"
        '<|constrain|>json<|message|>{"a": 17, "b": 25}<|call|>', [SUM], "I look."),
}  # fmt: skip
