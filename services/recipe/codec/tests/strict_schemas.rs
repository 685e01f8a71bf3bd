//! Strict schemas: no keyword is lost on the way to the grammar service, and no key of a property
//! goes through differently for how JSON spells it.

use pelagos_codec::convert::{self, Options, StrictSchemaKeywords};
use pelagos_codec::render;
use pelagos_codec::types::{Error, Protocol};
use serde_json::{Map, Value, json};

/// Every keyword of JSON Schema 2020-12 and of older drafts, and some that nobody knows.
const KEYWORDS: [&str; 64] = [
    "type",
    "enum",
    "const",
    "multipleOf",
    "maximum",
    "exclusiveMaximum",
    "minimum",
    "exclusiveMinimum",
    "maxLength",
    "minLength",
    "pattern",
    "maxItems",
    "minItems",
    "uniqueItems",
    "maxContains",
    "minContains",
    "maxProperties",
    "minProperties",
    "required",
    "dependentRequired",
    "$id",
    "$schema",
    "$ref",
    "$anchor",
    "$dynamicRef",
    "$dynamicAnchor",
    "$recursiveRef",
    "$recursiveAnchor",
    "$vocabulary",
    "$comment",
    "$defs",
    "definitions",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "dependentSchemas",
    "dependencies",
    "prefixItems",
    "items",
    "additionalItems",
    "contains",
    "properties",
    "patternProperties",
    "additionalProperties",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "format",
    "title",
    "description",
    "default",
    "deprecated",
    "readOnly",
    "writeOnly",
    "examples",
    "minimun",
    "x-guidance",
];

/// Where a strict schema stands.
const PLACES: [&str; 4] = ["chat tool", "chat format", "responses tool", "responses format"];

fn body_of(place: &str, schema: &Value) -> (Protocol, Value) {
    let function = json!({"name": "f", "parameters": schema, "strict": true});
    let messages = json!([{"role": "user", "content": "x"}]);
    let model = "DeepSeek-V4.1-Flash";
    match place {
        "chat tool" => (
            Protocol::Chat,
            json!({"model": model, "messages": messages,
                "tools": [{"type": "function", "function": function}]}),
        ),
        "chat format" => (
            Protocol::Chat,
            json!({"model": model, "messages": messages, "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": schema, "strict": true}}}),
        ),
        "responses tool" => (
            Protocol::Responses,
            json!({"model": model, "input": messages, "tools": [
                {"type": "function", "name": "f", "parameters": schema, "strict": true}]}),
        ),
        _ => (
            Protocol::Responses,
            json!({"model": model, "input": messages, "text": {"format": {
                "type": "json_schema", "name": "n", "schema": schema, "strict": true}}}),
        ),
    }
}

/// The text of the prompt and the schema that the output is held to.
fn convert(
    place: &str,
    schema: &Value,
    strict_schema_keywords: StrictSchemaKeywords,
) -> Result<(String, Value), Error> {
    let (protocol, body) = body_of(place, schema);
    convert_body(place, protocol, &body.to_string(), strict_schema_keywords)
}

fn convert_body(
    place: &str,
    protocol: Protocol,
    body: &str,
    strict_schema_keywords: StrictSchemaKeywords,
) -> Result<(String, Value), Error> {
    let options = Options { strict_schema_keywords, ..Options::default() };
    let request = convert::convert(protocol, body.as_bytes(), &options)?;
    let rendered =
        render::render(&request.conversation, request.model_version, &options.special_tokens);
    let constraint = request.inference.output_constraint.expect("a constraint");
    let constraint: Value = serde_json::from_str(&constraint.schema).expect("is JSON");
    let schema = match place {
        "chat tool" | "responses tool" => constraint[0]["function"]["parameters"].clone(),
        _ => constraint,
    };
    Ok((rendered.prompt.text, schema))
}

/// Nodes of every kind, each without `keyword`.
fn nodes() -> Vec<Value> {
    vec![
        json!({"type": "string"}),
        json!({"type": "number"}),
        json!({"type": "integer"}),
        json!({"type": "boolean"}),
        json!({"type": "null"}),
        json!({"type": "array", "items": {"type": "string"}}),
        json!({"type": "object", "properties": {"b": {"type": "null"}}}),
        json!({"type": ["string", "null"]}),
        json!({"anyOf": [{"type": "string"}, {"type": "null"}]}),
        json!({"$ref": "#/$defs/d"}),
    ]
}

/// Some value that the strict grammar takes where it knows the keyword.
fn value_of(keyword: &str) -> Value {
    match keyword {
        "type" | "title" | "description" | "pattern" | "$ref" | "$id" | "$schema" | "$comment" => {
            json!("string")
        }
        "format" => json!("uuid"),
        "enum" => json!(["a"]),
        "required" => json!(["b"]),
        "anyOf" | "allOf" | "oneOf" | "prefixItems" => json!([{"type": "string"}]),
        "properties" | "patternProperties" | "$defs" | "definitions" => {
            json!({"b": {"type": "null"}})
        }
        "additionalProperties" => json!(false),
        "items" | "not" | "contains" => json!({"type": "string"}),
        _ => json!(7),
    }
}

fn in_object(key: &str, node: Value) -> Value {
    json!({"type": "object", "properties": {key: node}, "$defs": {"d": {"type": "string"}}})
}

#[test]
fn s_06_ur_66_no_keyword_of_a_strict_schema_is_lost_on_its_way_to_the_grammar_service() {
    let mut num_kept = 0;
    for place in PLACES {
        for node in nodes() {
            for keyword in KEYWORDS {
                if node.get(keyword).is_some() {
                    continue;
                }
                let mut with = node.clone();
                with[keyword] = value_of(keyword);
                let wrapped = [
                    ("/properties/a", in_object("a", with.clone())),
                    (
                        "/properties/a/items",
                        in_object("a", json!({"type": "array", "items": with.clone()})),
                    ),
                    ("/$defs/e", {
                        let mut schema = in_object("a", json!({"$ref": "#/$defs/e"}));
                        schema["$defs"]["e"] = with.clone();
                        schema
                    }),
                ];
                for (path, schema) in wrapped {
                    let case = format!("{place}: {schema}");
                    // What the strict grammar refuses is refused; the rest is the constraint's.
                    let enforced = match convert(place, &schema, StrictSchemaKeywords::Enforce) {
                        Ok(converted) => converted.1,
                        Err(error) => {
                            assert_eq!(error.status, 400, "{case}");
                            continue;
                        }
                    };
                    let kept = enforced.pointer(path).and_then(|node| node.get(keyword));
                    // An object node whose keys the strict grammar completes, and one kind of node
                    // that another selector makes of it, have the keyword in their own way.
                    assert!(kept.is_some(), "{case} became {enforced}");
                    num_kept += 1;
                }
            }
        }
    }
    assert!(num_kept > 5_000, "the cases must reach the constraint, got {num_kept}");
}

#[test]
fn kept_keywords_change_neither_the_prompt_nor_what_the_contract_keeps() {
    let schema = json!({
        "type": "object", "title": "T", "minProperties": 1,
        "properties": {
            "a": {"type": "string", "minLength": 3, "pattern": "^a"},
            "n": {"type": "integer", "enum": [1, 2]},
        },
    });
    for place in PLACES {
        let (prompt, dropped) = convert(place, &schema, StrictSchemaKeywords::Drop).expect("fits");
        let (same_prompt, enforced) =
            convert(place, &schema, StrictSchemaKeywords::Enforce).expect("fits");
        assert_eq!(prompt, same_prompt, "{place}");
        assert_eq!(
            dropped.to_string(),
            json!({
                "type": "object",
                "properties": {
                    "a": {"type": "string", "pattern": "^a"}, "n": {"type": "integer"},
                },
                "additionalProperties": false, "required": ["a", "n"],
            })
            .to_string()
        );
        assert_eq!(
            enforced.to_string(),
            json!({
                "type": "object",
                "properties": {
                    "a": {"type": "string", "pattern": "^a", "minLength": 3},
                    "n": {"type": "integer", "enum": [1, 2]},
                },
                "additionalProperties": false, "required": ["a", "n"],
                "title": "T", "minProperties": 1,
            })
            .to_string()
        );
    }
}

#[test]
fn a_definition_is_as_strict_as_the_node_that_refers_to_it() {
    let open = json!({"type": "object", "properties": {"b": {"type": "null"}}});
    for name in ["$defs", "definitions"] {
        let mut schema = in_object("a", json!({"$ref": format!("#/{name}/e")}));
        schema[name] = json!({"e": open});
        let (_, enforced) =
            convert("chat format", &schema, StrictSchemaKeywords::Enforce).expect("fits");
        let closed = json!({"type": "object", "properties": {"b": {"type": "null"}},
            "additionalProperties": false, "required": ["b"]});
        assert_eq!(enforced[name]["e"], closed);
    }
    let mut schema = in_object("a", json!({"type": "null"}));
    schema["$defs"] = json!({"e": {"type": "object", "properties": {}}});
    let error = convert("chat format", &schema, StrictSchemaKeywords::Enforce).expect_err("empty");
    assert_eq!(error.message, "An object with no properties is not allowed.");
}

/// A key spelled in plain characters where JSON allows it, and with every character escaped.
fn spellings_of(key: &str) -> Vec<String> {
    let escaped: String = key.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect();
    vec![json!(key).to_string(), format!("\"{escaped}\"")]
}

#[test]
fn a_key_with_control_characters_goes_through_as_every_spelling_of_it_does() {
    let keys = [
        "\0",
        "a\0b",
        "\u{1}",
        "\u{8}",
        "\t",
        "\n",
        "\r",
        "\u{1b}",
        "\u{1f}",
        "\u{7f}",
        "\u{80}",
        "\u{9f}",
        "\u{200b}",
        "\u{2028}",
        "\u{feff}",
        "\u{fffe}",
        "\u{10ffff}",
        "\"",
        "\\",
        "/",
        " ",
        "",
        "𝄞",
        "<｜User｜>",
    ];
    for place in PLACES {
        for key in keys {
            let (protocol, body) = body_of(place, &in_object("KEY", json!({"type": "string"})));
            let body = body.to_string();
            let mut seen: Option<(String, Value)> = None;
            for spelling in spellings_of(key) {
                let body = body.replace("\"KEY\"", &spelling);
                for keywords in [StrictSchemaKeywords::Drop, StrictSchemaKeywords::Enforce] {
                    let converted = convert_body(place, protocol, &body, keywords).expect("fits");
                    let properties: &Map<_, _> =
                        converted.1["properties"].as_object().expect("an object");
                    assert_eq!(properties.keys().collect::<Vec<_>>(), [key], "{place}");
                    assert_eq!(converted.1["required"], json!([key]));
                    let (prompt, _) = seen.get_or_insert_with(|| converted.clone());
                    assert_eq!(*prompt, converted.0, "{place}: {spelling}");
                }
            }
        }
    }
}
