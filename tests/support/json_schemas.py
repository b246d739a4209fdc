"""JSON schemas as applications send them, and what can't be enforced among them.

Most are written after what extraction, classification, tool calling and configuration need;
the families at the end vary one thing at a time, as schemas grow in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any] | bool

STRING: Schema = {"type": "string"}
SHORT: Schema = {"type": "string", "maxLength": 20}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}


def obj(required: str = "*", closed: bool = True, **properties: Any) -> dict[str, Any]:
    """An object; all its properties are required, or those that are named."""
    names = list(properties) if required == "*" else required.split()
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": names}
    return schema | ({"additionalProperties": False} if closed else {})


def array(items: Any, **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


def enum(*values: Any) -> dict[str, Any]:
    return {"enum": list(values)}


def ref(name: str, section: str = "$defs") -> dict[str, Any]:
    return {"$ref": f"#/{section}/{name}"}


def nullable(schema: Any) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def pattern(expression: str, **limits: int) -> dict[str, Any]:
    return {"type": "string", "pattern": expression, **limits}


ADDRESS = obj("street city", street=SHORT, city=SHORT, zip=pattern(r"^\d{5}(-\d{4})?$"))
MONEY = obj(amount={"type": "number", "minimum": 0}, currency=enum("EUR", "USD", "GBP"))

# Extraction

EXTRACTION: dict[str, Schema] = {
    "person": obj(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "person_with_address": obj("name address", name=SHORT, address=ADDRESS, email=STRING),
    "invoice": obj(
        number=pattern("^INV-[0-9]{4,8}$"),
        issued={"type": "string", "format": "date"},
        lines=array(obj(text=SHORT, quantity=INTEGER, price=MONEY), minItems=1, maxItems=3),
        total=MONEY,
        paid=BOOLEAN,
    ),
    "receipt": obj(
        "merchant total", merchant=SHORT, total=NUMBER, tip=nullable(NUMBER), items=array(SHORT)
    ),
    "resume": obj(
        "name skills",
        name=SHORT,
        skills=array(SHORT, maxItems=4),
        jobs=array(obj("title", title=SHORT, from_year=INTEGER, to_year=nullable(INTEGER))),
    ),
    "event": obj(
        name=SHORT, date={"type": "string", "format": "date-time"}, participants=array(SHORT)
    ),
    "math_steps": obj(
        steps=array(obj(explanation=SHORT, output=SHORT), maxItems=3), final_answer=SHORT
    ),
    "paper": obj(
        title=SHORT, authors=array(SHORT, maxItems=3), abstract=SHORT, keywords=array(SHORT)
    ),
    "contact": obj(
        "email",
        email={"type": "string", "format": "email"},
        phone=pattern(r"^\+[1-9]\d{6,14}$"),
        site={"type": "string", "format": "uri", "maxLength": 60},
    ),
    "medication": obj(
        drug=SHORT, dose=pattern("^[0-9]+ ?(mg|ml|g)$", maxLength=10), times=enum(1, 2, 3)
    ),
    "recipe": obj(
        title=SHORT,
        minutes={"type": "integer", "exclusiveMinimum": 0, "maximum": 600},
        ingredients=array(obj("name", name=SHORT, amount=NUMBER, unit=SHORT), maxItems=3),
    ),
    "quote_with_source": obj(quote=SHORT, page=nullable({"type": "integer", "minimum": 1})),
    "table_row": obj(
        cells=array({"type": ["string", "number", "null"], "maxLength": 9}, maxItems=4)
    ),
    "entities": obj(
        entities=array(
            obj(text=SHORT, label=enum("PER", "ORG", "LOC"), start=INTEGER, end=INTEGER),
            maxItems=3,
        )
    ),
    "key_values": {"type": "object", "additionalProperties": SHORT, "maxProperties": 3},
    "geo_point": obj(
        lat={"type": "number", "minimum": -90, "maximum": 90},
        lon={"type": "number", "minimum": -180, "maximum": 180},
    ),
    "product": obj(
        "sku name price",
        sku=pattern("^[A-Z]{3}-[0-9]{3}$"),
        name=SHORT,
        price={"type": "number", "exclusiveMinimum": 0},
        tags=array(enum("new", "sale", "eco"), maxItems=3),
        stock={"type": "integer", "minimum": 0, "maximum": 20_000_000_000},
    ),
    "open_object": obj("id", closed=False, id=INTEGER, note=SHORT),
}

# Classification and judgement

CLASSIFICATION: dict[str, Schema] = {
    "sentiment": obj(sentiment=enum("positive", "neutral", "negative")),
    "sentiment_scored": obj(
        label=enum("positive", "negative"),
        confidence={"type": "number", "minimum": 0, "maximum": 1},
    ),
    "multi_label": obj(labels=array(enum("a", "b", "c", "d"), minItems=1, maxItems=4)),
    "bare_enum": {"type": "string", "enum": ["yes", "no", "unsure"]},
    "mixed_enum": enum(1, "one", None, True, 1.5, {"a": [1]}, []),
    "const": {"const": "always this"},
    "const_number": obj(version={"const": 2}, body=SHORT),
    "judge": obj(reasoning=SHORT, score={"type": "integer", "minimum": 1, "maximum": 5}),
    "pairwise": obj(winner=enum("A", "B", "tie"), why=SHORT),
    "boolean": BOOLEAN,
    "moderation": obj(
        flagged=BOOLEAN, categories=obj(hate=BOOLEAN, violence=BOOLEAN, spam=BOOLEAN)
    ),
    "intent": obj(
        intent=enum("book", "cancel", "other"),
        slots={"type": "object", "additionalProperties": SHORT},
    ),
    "nullable_label": obj(label={"type": ["string", "null"], "enum": ["x", "y", None]}),
    "rubric": obj(
        **{name: {"type": "integer", "minimum": 0, "maximum": 10} for name in ("tone", "facts")}
    ),
}

# Arguments of tools

TOOLS: dict[str, Schema] = {
    "weather": obj("location", location=SHORT, unit=enum("celsius", "fahrenheit")),
    "no_parameters": {"type": "object", "properties": {}},
    "no_parameters_closed": {"type": "object", "properties": {}, "additionalProperties": False},
    "search": obj("query", query=SHORT, limit={"type": "integer", "minimum": 1, "maximum": 100}),
    "send_mail": obj(
        "to subject",
        to=array({"type": "string", "format": "email", "maxLength": 30}, minItems=1, maxItems=2),
        subject=SHORT,
        body=STRING,
    ),
    "sql_filter": {
        "$defs": {
            "filter": {
                "anyOf": [
                    obj(column=SHORT, op=enum("=", "<", ">", "like"), value=SHORT),
                    obj(all=array(ref("filter"), minItems=1, maxItems=2)),
                ]
            }
        },
        **ref("filter"),
    },
    "file_edit": obj(
        path=pattern("^[a-z/]{1,20}[.]py$"),
        edits=array(obj(line={"type": "integer", "minimum": 1}, text=SHORT), maxItems=3),
    ),
    "calendar": obj(
        "start",
        start={"type": "string", "format": "date-time"},
        duration={"type": "string", "format": "duration"},
        all_day=BOOLEAN,
    ),
    "either_call": {
        "anyOf": [
            obj(name={"const": "get"}, arguments=obj(key=SHORT)),
            obj(name={"const": "put"}, arguments=obj(key=SHORT, value=SHORT)),
        ]
    },
    "list_of_calls": array(
        {
            "anyOf": [
                obj(name={"const": "add"}, arguments=obj(a=NUMBER, b=NUMBER)),
                obj(name={"const": "now"}, arguments={"type": "object", "properties": {}}),
            ]
        },
        minItems=1,
        maxItems=2,
    ),
    "color": obj(color=pattern("^#[0-9a-f]{6}$")),
    "openapi_formats": obj(
        id={"type": "integer", "format": "int64"},
        ratio={"type": "number", "format": "double"},
        secret={"type": "string", "format": "password", "maxLength": 8},
    ),
    "shell": obj(command=array(SHORT, minItems=1, maxItems=3), timeout=nullable(INTEGER)),
    "move": obj(direction=enum("n", "s", "e", "w"), steps={"type": "integer", "minimum": 1}),
    "options_with_defaults": obj(
        "", depth={"type": "integer", "default": 3}, verbose={"type": "boolean", "default": False}
    ),
}

# What libraries make of classes

GENERATED: dict[str, Schema] = {
    "pydantic_nested": {
        "$defs": {"Item": {"title": "Item", **obj(id=INTEGER, name={"title": "Name", **SHORT})}},
        "title": "Order",
        **obj(items=array(ref("Item"), maxItems=2), note={"default": None, **nullable(SHORT)}),
    },
    "pydantic_union": {
        "$defs": {
            "Cat": obj(kind={"const": "cat"}, lives=INTEGER),
            "Dog": obj(kind={"const": "dog"}),
        },
        **obj(pet={"anyOf": [ref("Cat"), ref("Dog")]}),
    },
    "pydantic_discriminated": {
        "$defs": {
            "Cat": obj("lives", kind={"const": "cat", "default": "cat"}, lives=INTEGER),
            "Dog": obj("", kind={"const": "dog", "default": "dog"}),
        },
        **obj(
            pet={
                "oneOf": [ref("Cat"), ref("Dog")],
                "discriminator": {
                    "propertyName": "kind",
                    "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
                },
            }
        ),
    },
    "pydantic_enum_class": {
        "$defs": {"Color": {"title": "Color", "type": "string", "enum": ["red", "blue"]}},
        **obj(color=ref("Color"), other=nullable(ref("Color"))),
    },
    "pydantic_recursive": {
        "$defs": {"Node": obj("value", value=INTEGER, next=nullable(ref("Node")))},
        **ref("Node"),
    },
    "pydantic_tuple": obj(
        pair={
            "type": "array",
            "prefixItems": [INTEGER, SHORT],
            "minItems": 2,
            "maxItems": 2,
        }
    ),
    "pydantic_dict": obj(scores={"type": "object", "additionalProperties": NUMBER}),
    "pydantic_uuid": obj(id={"type": "string", "format": "uuid"}),
    "pydantic_decimal": obj(price={"anyOf": [NUMBER, pattern(r"^-?\d{1,6}(\.\d{1,4})?$")]}),
    "zod_strict": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **obj("id", id=INTEGER, at={"type": "string", "format": "date-time"}),
    },
    "zod_union": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **obj(value={"type": ["string", "number"], "maxLength": 9}),
    },
    "draft7_definitions": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"point": obj(x=NUMBER, y=NUMBER)},
        **obj(from_=ref("point", "definitions"), to=ref("point", "definitions")),
    },
    "draft7_tuple": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [INTEGER, SHORT],
        "additionalItems": False,
        "minItems": 2,
    },
    "inheritance": {
        "$defs": {"Base": obj("id", closed=False, id=INTEGER)},
        "allOf": [ref("Base"), obj("name", closed=False, name=SHORT)],
    },
    "titles_everywhere": {
        "title": "T",
        "description": "d",
        "examples": [{}],
        **obj(a={"title": "A", "description": "x", "examples": [1], **INTEGER}),
    },
}

# Trees, documents, configuration

STRUCTURES: dict[str, Schema] = {
    "tree": {
        "$defs": {"tree": obj(name=SHORT, children=array(ref("tree"), maxItems=2))},
        **ref("tree"),
    },
    "root_recursion": obj("name", name=SHORT, child={"$ref": "#"}),
    "linked_lists": {
        "$defs": {
            "a": obj("v", v=INTEGER, b=ref("b")),
            "b": obj("w", w=BOOLEAN, a=ref("a")),
        },
        **ref("a"),
    },
    "expression": {
        "$defs": {
            "e": {
                "anyOf": [NUMBER, obj(op=enum("+", "*"), left=ref("e"), right=ref("e"))],
            }
        },
        **ref("e"),
    },
    "ui": {
        "$defs": {
            "node": obj(
                type=enum("div", "button", "text"),
                label=SHORT,
                children=array(ref("node"), maxItems=2),
                attributes=array(obj(name=SHORT, value=SHORT), maxItems=2),
            )
        },
        **ref("node"),
    },
    "geojson": obj(type={"const": "Point"}, coordinates=array(NUMBER, minItems=2, maxItems=3)),
    "matrix": array(array(INTEGER, minItems=3, maxItems=3), minItems=3, maxItems=3),
    "json_patch": array(
        {
            "anyOf": [
                obj(op={"const": "remove"}, path=SHORT),
                obj(op=enum("add", "replace"), path=SHORT, value=SHORT),
            ]
        },
        maxItems=3,
    ),
    "package": obj(
        "name version",
        closed=False,
        name=pattern("^[a-z][a-z-]{0,20}$"),
        version=pattern(r"^\d{1,3}\.\d{1,3}\.\d{1,3}$"),
        dependencies={"type": "object", "additionalProperties": SHORT, "maxProperties": 2},
    ),
    "workflow": obj(
        jobs={
            "type": "object",
            "patternProperties": {"^[a-z]{1,8}$": obj(steps=array(SHORT, maxItems=2))},
            "additionalProperties": False,
            "maxProperties": 2,
        }
    ),
    "health_record": obj(
        "patient",
        patient=obj(
            id={"type": "string", "format": "uuid"}, born={"type": "string", "format": "date"}
        ),
        vitals=array(
            obj(kind=enum("bp", "hr"), value=NUMBER, at={"type": "string", "format": "time"}),
            maxItems=2,
        ),
    ),
    "ipv4_or_6": obj(
        address={
            "anyOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}]
        }
    ),
    "hostname": obj(host={"type": "string", "format": "hostname"}),
    "quiz": obj(
        questions=array(
            obj(
                text=SHORT,
                options=array(SHORT, minItems=2, maxItems=4),
                answer={"type": "integer", "minimum": 0, "maximum": 3},
            ),
            minItems=1,
            maxItems=2,
        )
    ),
    "chess": array(pattern("^([KQRBN]?[a-h][1-8]|O-O)$"), minItems=1, maxItems=6),
    "translations": obj(**dict.fromkeys(("de", "fr", "日本語", "español"), SHORT)),
    "odd_names": obj(
        **{'with "quotes"': INTEGER, "a/b~c": INTEGER, "new\nline": BOOLEAN, "": SHORT}
    ),
    "anything": {},
    "true": True,
    "object": {"type": "object"},
    "array": {"type": "array", "maxItems": 3},
    "any_property": obj(payload={}),
    "string": STRING,
    "integer": INTEGER,
    "number": NUMBER,
    "null": {"type": "null"},
    "several_types": {"type": ["integer", "boolean", "null"]},
    "bill_of_materials": {
        "$defs": {"part": obj("name", name=SHORT, count=INTEGER, parts=array(ref("part")))},
        **obj(product=SHORT, parts=array(ref("part"), maxItems=2)),
    },
    "timeline": obj(
        events=array(
            obj(
                "when what",
                when={"type": "string", "format": "date-time"},
                what=SHORT,
                who=nullable(obj(name=SHORT, role=enum("lead", "member"))),
            ),
            maxItems=2,
        )
    ),
    "survey": obj(
        answers={
            "type": "object",
            "properties": {f"q{i}": {"type": ["integer", "null"]} for i in range(5)},
            "additionalProperties": False,
        }
    ),
    "either_shape": obj(
        shape={
            "oneOf": [
                obj(type={"const": "circle"}, radius={"type": "number", "exclusiveMinimum": 0}),
                obj(type={"const": "square"}, side={"type": "number", "exclusiveMinimum": 0}),
            ]
        }
    ),
    "scalar_or_list": {"anyOf": [SHORT, array(SHORT, minItems=1, maxItems=3)]},
    "nested_lists": array(array(array(BOOLEAN, maxItems=2), maxItems=2), maxItems=2),
    "log_filter": obj(
        "level",
        level=enum("debug", "info", "warning", "error"),
        since={"type": "string", "format": "date-time"},
        fields=array(pattern("^[a-z_]{1,12}$"), maxItems=3),
    ),
    "state_machine": obj(
        states={
            "type": "object",
            "additionalProperties": obj(next=array(SHORT, maxItems=2)),
            "maxProperties": 2,
        }
    ),
    "unsigned": obj(id={"type": "integer", "minimum": 0, "maximum": 2**64 - 1}),
    "described": {"description": "An answer.", "default": {}, **obj(answer=SHORT)},
    "at_least_two": {"type": "object", "additionalProperties": INTEGER, "minProperties": 2},
}


def families() -> Iterator[tuple[str, Schema]]:
    """Schemas that vary one thing."""
    for low, high in (
        *((0, 1), (0, 9), (1, 10), (-5, 5), (-1000, -10), (18, 99), (1900, 2100), (7, 7)),
        *(
            (0, 255),
            (0, 65535),
            (-(2**31), 2**31 - 1),
            (0, 2**53),
            (-(2**63), 2**63 - 1),
            (0, 2**64 - 1),
        ),
        *((100, 20_000_000_000), (999, 1001)),
    ):
        yield f"integer_{low}_{high}", obj(n={"type": "integer", "minimum": low, "maximum": high})
    for low, high in (
        (0, 1),
        (-1, 1),
        (0.5, 0.75),
        (-273.15, 1000),
        (0, 1e6),
        (1.5, 2.25),
        (98.6, 99),
    ):
        yield f"number_{low}_{high}", obj(n={"type": "number", "minimum": low, "maximum": high})
    for name, limits in (
        ("min", {"minimum": 10}),
        ("max", {"maximum": 10}),
        ("above", {"exclusiveMinimum": 0}),
        ("below", {"exclusiveMaximum": 0}),
        ("step", {"multipleOf": 5, "minimum": 0, "maximum": 1000}),
    ):
        yield f"integer_{name}", obj(n={"type": "integer", **limits})
        yield f"array_of_{name}", array({"type": "integer", **limits}, minItems=1, maxItems=3)
    for expression in (
        *("^a$", "^[a-z]+$", "^[A-Z][a-z]{2,10}$", r"^\d{3}-\d{4}$", "^(yes|no|maybe)$", "^$"),
        *(r"^[^@\s]{1,9}@[^@\s]{1,9}\.com$", "^(0|[1-9][0-9]{0,3})$", "^[A-Za-z0-9_-]{22}$"),
        *(r"^\$[0-9]{1,3}(,[0-9]{3})*\.[0-9]{2}$", "^v[0-9]+$", "^.{3}$", "^[äöüß]{1,4}$"),
        *(r"^[0-9]{4}-(0[1-9]|1[0-2])$", "^[01]{8}$", "^(ab|cd){2,3}$", "[0-9]", "^x"),
    ):
        yield f"pattern {expression}", obj(s=pattern(expression, maxLength=40))
    for low, high in ((0, 0), (1, 1), (0, 5), (3, 8), (10, 40), (2, 200)):
        yield f"length_{low}_{high}", obj(s={"type": "string", "minLength": low, "maxLength": high})
        yield f"items_{low}_{high}", obj(a=array(enum(1, 2), minItems=low, maxItems=high))
    for count in (1, 2, 10, 100, 1000):
        yield f"enum_of_{count}", obj(e={"enum": [f"value {i * i}" for i in range(count)]})
    for depth in (1, 3, 6, 10, 14):
        schema: dict[str, Any] = obj(leaf=BOOLEAN)
        for level in range(depth):
            schema = obj(**{f"level_{level}": schema})
        yield f"depth_{depth}", schema
    for count in (5, 20, 60, 150):
        kinds = (BOOLEAN, enum("a", "b"), INTEGER, nullable(BOOLEAN))
        yield f"wide_{count}", obj(**{f"field_{i}": kinds[i % 4] for i in range(count)})
        yield f"wide_optional_{count}", obj("", **{f"f{i}": kinds[i % 2] for i in range(count)})
    for count in (2, 5, 20):
        variants = [obj(kind={"const": f"k{i}"}, **{f"only_{i}": BOOLEAN}) for i in range(count)]
        yield f"any_of_{count}", {"anyOf": variants}
        yield f"one_of_{count}", {"oneOf": variants}
        yield f"list_any_of_{count}", array({"anyOf": variants}, minItems=1, maxItems=2)
    for format_name in ("date", "time", "date-time", "duration", "email", "uuid", "ipv4", "ipv6"):
        yield f"format_{format_name}", obj(s={"type": "string", "format": format_name})
    for count in (2, 4, 8):
        parts = [obj(f"p{i}", closed=False, **{f"p{i}": BOOLEAN}) for i in range(count)]
        yield f"all_of_{count}", {"allOf": parts}


# What can't be enforced, with the word that the refusal has to have.
UNSUPPORTED: dict[str, tuple[Schema, str]] = {
    "not": (obj(a={"not": {"type": "string"}}), "not"),
    "if": (obj("a", a=INTEGER) | {"if": {"required": ["a"]}, "then": {}}, "if"),
    "unique": (obj(a=array(INTEGER) | {"uniqueItems": True}), "uniqueItems"),
    "contains": ({"type": "array", "contains": INTEGER}, "contains"),
    "dependent": (obj("", a=INTEGER) | {"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "names": ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    "unevaluated": (obj(a=INTEGER) | {"unevaluatedProperties": False}, "unevaluatedProperties"),
    "overlapping": (
        {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 9}]},
        "oneOf",
    ),
    "look_ahead": (obj(s=pattern("^(?=a)b")), "look-around"),
    "iri": (obj(s={"type": "string", "format": "iri"}), "format"),
    "other_document": (obj(a={"$ref": "https://example.com/s.json"}), "$ref"),
    "dynamic": (obj(a={"$dynamicRef": "#x"}), "$dynamicRef"),
}

# What is no schema, with the place that the refusal has to name.
BROKEN: dict[str, tuple[str, str]] = {
    "property_is_a_string": ('{"type": "object", "properties": {"foo": "bar"}}', "/properties/foo"),
    "number": ("5", "schema is 5"),
    "null": ("null", "schema is null"),
    "list": ("[]", "schema is []"),
    "false": ("false", "no text"),
    "half": ("{", "JSON"),
    "ref_to_nowhere": ('{"$ref": "#/$defs/x"}', "/$ref"),
    "ref_elsewhere": ('{"items": {"$ref": "file:///etc/passwd"}}', "/items/$ref"),
    "type": ('{"properties": {"a": {"type": "strng"}}}', "/properties/a/type"),
    "empty_enum": ('{"enum": []}', "/enum"),
    "required": ('{"required": "a"}', "/required"),
    "bounds": ('{"items": {"minimum": 3, "maximum": 2}}', "/items"),
    "infinite": ('{"minimum": 1e400}', "JSON"),
    "negative": ('{"minLength": -1}', "/minLength"),
    "deep": ('{"items":' * 5000 + "{}" + "}" * 5000, "nested too deep"),
    "deep_any_of": ('{"anyOf":[' * 40 + "{}" + "]}" * 40, "32 levels"),
    "endless": ('{"$ref": "#"}', "no text"),
    "parentheses": ('{"type": "string", "pattern": "' + "(" * 60_000 + '"}', "regex"),
}


def all_schemas() -> dict[str, Schema]:
    """Every schema that has to be enforced, by name."""
    schemas: dict[str, Schema] = {}
    for group in (EXTRACTION, CLASSIFICATION, TOOLS, GENERATED, STRUCTURES):
        schemas |= group
    return schemas | dict(families())
