"""What reading answers costs, in every form of calls."""

from benchmarks.readers import FORMS, measure, table, texts, tools
from mlxinfer.output_format import OutputFormat
from mlxinfer.output_format.reader import OutputReader
from mlxinfer.output_format.table import FAMILIES


def test_every_form_is_read_as_a_call():
    for form in FORMS:
        reader = OutputReader(OutputFormat(None, FAMILIES[form].calls, "option"), tools())
        events = [*reader.add(texts(form, 300)["a call"]), *reader.finish()]
        assert [event.text for event in events if event.kind == "call_begin"] == ["write_file"], form


def test_the_table_has_a_line_for_each():
    found = measure(FORMS[0], 1, size=100)
    assert [cost.work for cost in found] == ["hermes, reasoning", "hermes, free text", "hermes, a call"]
    assert table(found).count("\n") == 5
