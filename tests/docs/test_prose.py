"""The prose of the package and the documents stays plain: limits on docstrings, sentences and lines."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from support.prose import percentile_90, python_files, question_docstrings, sentences, wide_lines, word_count

ROOT = Path(__file__).parents[2]
PACKAGE = [ROOT / name for name in ("mlxinfer", "convert", "kernels_cpu", "kernels_metal")]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]

LONGEST_MEAN_SENTENCE = 25
LONGEST_P90_SENTENCE = 30
COLUMNS = 120


def test_no_docstring_opens_with_a_question_word() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {line}" for file in python_files(*PACKAGE) for line in question_docstrings(file.read_text("utf-8"))
    ]
    assert found == []


def test_sentences_of_the_documents_are_short() -> None:
    found = [(word_count(sentence), page.name, sentence) for page in PAGES for sentence in sentences(page.read_text("utf-8"))]
    counts = [count for count, _, _ in found]
    longest = "\n".join(f"{count} words, {name}: {sentence}" for count, name, sentence in sorted(found, reverse=True)[:20])
    assert mean(counts) <= LONGEST_MEAN_SENTENCE, longest
    assert percentile_90(counts) <= LONGEST_P90_SENTENCE, longest


def test_lines_of_the_documents_fit_the_columns() -> None:
    found = [f"{page.name}: {line}" for page in PAGES for line in wide_lines(page.read_text("utf-8"), COLUMNS)]
    assert found == []


def test_question_docstrings_of_modules_classes_functions_and_fields() -> None:
    source = '"""What a module is."""\nclass A:\n    """Whether.\n\n    More."""\n    x: int\n    """Where it is."""\n'
    source += 'def f():\n    """However long."""\ndef g():\n    """Return how many."""\n    text = "What"\n'
    assert question_docstrings(source) == ["What a module is.", "Whether.", "Where it is."]


def test_sentences_leave_out_code_tables_and_headings() -> None:
    page = "---\nkey: value\n---\n# A heading\n\n```\nnot prose. At all.\n```\n| a | b |\n\n"
    page += "One\nsentence. And a `x y` [link](a.md)!\n<!-- no. -->\n- an item\n- another (see e.g. this one)\n\n    code\n"
    assert list(sentences(page)) == ["One sentence.", "And a CODE link!", "an item", "another (see eg this one)"]


def test_sentences_end_before_a_capital_only() -> None:
    assert list(sentences("It takes 0.5 s vs. one. (Or two.) Then more")) == ["It takes 0.5 s vs. one.", "(Or two.", "Then more"]


def test_words_need_a_letter_or_digit() -> None:
    assert word_count("a – b, 12 %") == 3


def test_wide_lines_leave_out_code_tables_and_links() -> None:
    wide = "w" * 30
    page = f"{wide}\n| {wide} |\n[{wide}](a)\n```\n{wide}\n```\nshort\n"
    assert wide_lines(page, 20) == [wide]


def test_percentile_90() -> None:
    assert percentile_90(range(1, 101)) == 91
