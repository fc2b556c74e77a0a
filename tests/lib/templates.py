"""Chat templates with tools, as families of models have them, without what does not matter here."""

_END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_SCHEMAS = (
    "{% if messages[0].role != 'system' or tools %}<|im_start|>system\nYou answer. Do you? Yes."
    "{% for tool in tools or [] %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
)
_CALLS = (
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)

# Results that follow each other share a user's turn (Qwen2.5, Qwen3).
QWEN = f"""{_SCHEMAS}{{% for m in messages %}}
{{%- if m.role == 'tool' %}}
    {{%- if loop.previtem.role != 'tool' %}}{{{{ '<|im_start|>user' }}}}{{% endif %}}
    {{{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}}}
    {{%- if loop.last or loop.nextitem.role != 'tool' %}}{{{{ '<|im_end|>\n' }}}}{{% endif %}}
{{%- else %}}{{{{ '<|im_start|>' + m.role + '\n' + m.content }}}}{_CALLS}{{{{ '<|im_end|>\n' }}}}{{% endif %}}
{{%- endfor %}}{_END}"""

# Each result has a user's turn, and says which tool it is from. Arguments are text.
NAMED = f"""{_SCHEMAS}{{% for m in messages %}}
{{%- if m.role == 'tool' %}}{{{{ '<|im_start|>user\n[Result of ' + m.name + ']: ' + m.content }}}}
{{%- else %}}{{{{ '<|im_start|>' + m.role + '\n' + m.content }}}}
    {{%- for call in m.tool_calls or [] %}}{{{{ call.function.name + call.function.arguments }}}}{{% endfor %}}
{{%- endif %}}{{{{ '<|im_end|>\n' }}}}{{% endfor %}}{_END}"""

# Results have turns of their own (Hermes).
HERMES = f"""{_SCHEMAS}{{% for m in messages %}}
{{{{- '<|im_start|>' + m.role + '\n' + m.content }}}}{_CALLS}{{{{ '<|im_end|>\n' }}}}{{% endfor %}}{_END}"""

# The tools' schemas open the first user's turn (Llama 3.1).
LLAMA = """<|bos|>{% for m in messages %}{% set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|head|>' + role + '<|/head|>\n\n' }}
{%- if tools and loop.index0 == (1 if messages[0].role == 'system' else 0) %}
    {{- 'Given the following functions, please respond.\n\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}
{%- endif %}
{{- m.content | tojson if m.role == 'tool' else m.content | trim }}
{%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"""

# Calls have ids of nine letters, and the schemas stand before the last user's turn (Mistral).
MISTRAL = """<s>{% for m in messages %}
{%- if m.role == 'user' %}
    {%- if tools and messages[loop.index:] | selectattr('role', 'equalto', 'user') | list | length == 0 %}
        {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
    {%- endif %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + {'content': m.content} | tojson + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}
    {%- for call in m.tool_calls if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endfor %}
    {{- '[TOOL_CALLS] ' + m.tool_calls | map(attribute='function') | list | tojson + '</s>' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"""

# There are no tools.
GEMMA = """<bos>{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{{- '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '</turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"""
