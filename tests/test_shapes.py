import pytest

from moira_cli.errors import CliError
from moira_cli.shapes import parse_floats, parse_geometry, parse_shape


@pytest.mark.parametrize(
    ("text", "tokens", "batch"),
    [
        ("32kx16", 32_768, 16),
        ("8Kx32", 8_192, 32),
        ("130kx4", 130_048, 4),
        ("131kx4", 131_072, 4),
        ("128kx4", 131_072, 4),
        ("2048x512", 2048, 512),
        ("100×1", 100, 1),
    ],
)
def test_shapes(text, tokens, batch):
    shape = parse_shape(text)
    assert (shape.context_tokens, shape.batch) == (tokens, batch)


@pytest.mark.parametrize("text", ["32x16k", "32k", "x16", "32kx", "0x4", "4kx0", "-1x2", "32k x 16 x 2", "1.5kx2", ""])
def test_bad_shapes(text):
    with pytest.raises(CliError, match="Use CONTEXTxBATCH"):
        parse_shape(text)


def test_swapped_shape_gets_the_right_one():
    with pytest.raises(CliError, match=r"Did you mean 16kx32\?"):
        parse_shape("32x16k")


def test_geometries():
    assert parse_geometry("llama-3.1-8b") == (32, 8, 128)
    assert parse_geometry("14/2/64") == (14, 2, 64)
    with pytest.raises(CliError, match="Did you mean 'llama-3.1-8b'"):
        parse_geometry("lama-3.1-8b")
    with pytest.raises(CliError, match="multiple of HKV"):
        parse_geometry("7/2/64")


def test_number_lists():
    assert parse_floats("--cv", "0, 0.4,1", 0, 10) == [0, 0.4, 1]
    for bad in ("a", "-1", "nan", "", "1,,b"):
        with pytest.raises(CliError, match="--cv"):
            parse_floats("--cv", bad, 0, 10)
