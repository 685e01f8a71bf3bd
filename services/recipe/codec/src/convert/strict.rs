//! The restricted schema grammar of `strict: true`, parsed and rewritten (recipe.md, section 6.7).
//!
//! Parsing walks a value that the JSON parser already bounded to 127 levels, so recursion is safe.

use serde::Deserialize;
use serde_json::{Map, Number, Value};

/// What a strict schema belongs to; the two differ in texts and in one allowance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    ToolParameters,
    ResponseFormat,
}

/// Returns the schema with only the kept keywords, every property required and nothing additional.
///
/// Errors: the sentence for the client.
pub fn rewrite(schema: &Value, subject: Subject) -> Result<Value, String> {
    let node = parse(schema).map_err(|detail| match subject {
        Subject::ToolParameters => format!("Invalid tool parameters schema : {detail}"),
        Subject::ResponseFormat => format!("Invalid json schema: {detail}"),
    })?;
    let is_object = matches!(node, Node::Object { .. });
    let may_be_empty = subject == Subject::ToolParameters;
    let rewritten = finish(node, may_be_empty)?;
    if !is_object {
        return Err(match subject {
            Subject::ToolParameters => {
                "The top level of the function parameters schema must be an object."
            }
            Subject::ResponseFormat => "The top level of the json schema must be an object.",
        }
        .to_owned());
    }
    Ok(rewritten)
}

/// The rewritten schema of a strict tool that declares no parameters.
pub fn empty_parameters() -> Value {
    serde_json::json!({
        "type": "object", "properties": {}, "additionalProperties": false, "required": [],
    })
}

enum Node {
    /// Holds no further nodes; already in its final form.
    Leaf(Map<String, Value>),
    Object {
        properties: Vec<(String, Node)>,
        required: Option<Vec<String>>,
        additional_properties: Option<bool>,
        description: Option<String>,
        definitions: Option<Vec<(String, Node)>>,
    },
    Array {
        items: Box<Node>,
        description: Option<String>,
    },
    AnyOf {
        choices: Vec<Node>,
        description: Option<String>,
    },
}

fn parse(value: &Value) -> Result<Node, String> {
    let missing = "one of `type`, `anyOf`, `$ref` field is required";
    let map = value.as_object().ok_or(missing)?;
    match (map.get("type"), map.get("anyOf"), map.get("$ref")) {
        (Some(types @ Value::Array(_)), _, _) => parse_type_list(map, types),
        (Some(_), _, _) => parse_typed(value),
        (None, Some(choices), _) => parse_any_of(map, choices),
        (None, None, Some(reference)) => {
            let target: String = read(reference).map_err(in_field("$ref"))?;
            Ok(Node::Leaf(Map::from_iter([("$ref".to_owned(), target.into())])))
        }
        (None, None, None) => Err(missing.to_owned()),
    }
}

fn parse_type_list(map: &Map<String, Value>, types: &Value) -> Result<Node, String> {
    #[derive(Deserialize, serde::Serialize)]
    #[serde(rename_all = "lowercase")]
    enum Scalar {
        String,
        Number,
        Integer,
        Boolean,
        Null,
    }
    let scalars: Vec<Scalar> = read(types).map_err(in_field("type"))?;
    let names = serde_json::to_value(scalars).map_err(|error| error.to_string())?;
    let mut out = Map::from_iter([("type".to_owned(), names)]);
    put_description(&mut out, described(map)?);
    Ok(Node::Leaf(out))
}

fn parse_any_of(map: &Map<String, Value>, choices: &Value) -> Result<Node, String> {
    let Value::Array(choices) = choices else {
        return Err(in_field("anyOf")(read::<Vec<Value>>(choices).err().unwrap_or_default()));
    };
    let choices = choices
        .iter()
        .map(parse_typed)
        .collect::<Result<Vec<_>, _>>()
        .map_err(in_field("anyOf"))?;
    Ok(Node::AnyOf { choices, description: described(map)? })
}

fn described(map: &Map<String, Value>) -> Result<Option<String>, String> {
    map.get("description").map_or(Ok(None), read).map_err(in_field("description"))
}

/// Parses a node that names its one type. Fields are read in the order the client wrote them, so
/// the first bad one is reported.
fn parse_typed(value: &Value) -> Result<Node, String> {
    let Value::Object(map) = value else {
        // The refusal names the reference codec's type; clients may have seen it.
        let error = read::<Map<String, Value>>(value).err().unwrap_or_default();
        return Err(
            error.replace("expected a map", "expected internally tagged enum JsonSchemaType")
        );
    };
    let kind = match map.get("type") {
        None => return Err("missing field `type`".to_owned()),
        Some(Value::String(kind)) => kind.as_str(),
        Some(other) => {
            let error = read::<String>(other).err().unwrap_or_default();
            return Err(error.replace("expected a string", "expected variant identifier"));
        }
    };
    match kind {
        "object" => parse_object(map),
        "array" => parse_array(map),
        "string" => parse_leaf(
            map,
            &[
                ("description", keep::<String>),
                ("pattern", keep::<String>),
                ("format", keep::<StringFormat>),
                ("enum", keep::<Vec<String>>),
            ],
        ),
        "number" => parse_leaf(map, &numeric_fields(keep::<Number>)),
        "integer" => parse_leaf(map, &numeric_fields(keep::<i64>)),
        "boolean" | "null" => parse_leaf(map, &[("description", keep::<String>)]),
        unknown => Err(format!(
            "unknown variant `{unknown}`, expected one of `object`, `string`, `number`, \
             `integer`, `boolean`, `array`, `null`"
        )),
    }
}

fn parse_object(map: &Map<String, Value>) -> Result<Node, String> {
    let (mut properties, mut required, mut definitions) = (Vec::new(), None, None);
    let (mut additional_properties, mut description) = (None, None);
    for (key, value) in map {
        match key.as_str() {
            "properties" => properties = parse_named(value)?.unwrap_or_default(),
            "$def" => definitions = parse_named(value)?,
            "required" => required = read(value)?,
            "additionalProperties" => additional_properties = read(value)?,
            "description" => description = read(value)?,
            _ => {}
        }
    }
    Ok(Node::Object { properties, required, additional_properties, description, definitions })
}

fn parse_named(value: &Value) -> Result<Option<Vec<(String, Node)>>, String> {
    match value {
        Value::Null => Ok(None),
        Value::Object(map) => map
            .iter()
            .map(|(key, value)| Ok((key.clone(), parse(value)?)))
            .collect::<Result<_, _>>()
            .map(Some),
        other => Err(read::<Map<String, Value>>(other).err().unwrap_or_default()),
    }
}

fn parse_array(map: &Map<String, Value>) -> Result<Node, String> {
    let (mut items, mut description) = (None, None);
    for (key, value) in map {
        match key.as_str() {
            "items" => items = Some(parse(value)?),
            "description" => description = read(value)?,
            _ => {}
        }
    }
    let items = Box::new(items.ok_or("missing field `items`")?);
    Ok(Node::Array { items, description })
}

#[derive(Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
enum StringFormat {
    Email,
    Hostname,
    Ipv4,
    Ipv6,
    Uuid,
}

type Reader = fn(&Value) -> Result<Option<Value>, String>;

fn numeric_fields(read_number: Reader) -> [(&'static str, Reader); 8] {
    [
        ("description", keep::<String>),
        ("const", read_number),
        ("default", read_number),
        ("minimum", read_number),
        ("maximum", read_number),
        ("exclusiveMinimum", read_number),
        ("exclusiveMaximum", read_number),
        ("multipleOf", read_number),
    ]
}

/// Checks the known fields in document order and writes them in the order of `fields`.
fn parse_leaf(map: &Map<String, Value>, fields: &[(&str, Reader)]) -> Result<Node, String> {
    let mut kept: Vec<Option<Value>> = fields.iter().map(|_| None).collect();
    for (key, value) in map {
        if let Some(at) = fields.iter().position(|(name, _)| name == key) {
            kept[at] = fields[at].1(value)?;
        }
    }
    let mut out = Map::new();
    out.insert("type".to_owned(), map.get("type").cloned().unwrap_or_default());
    for ((name, _), value) in fields.iter().zip(kept) {
        if let Some(value) = value {
            out.insert((*name).to_owned(), value);
        }
    }
    Ok(Node::Leaf(out))
}

/// Reads an optional field as `T` and gives it back as JSON; null is absent.
fn keep<T: for<'a> Deserialize<'a> + serde::Serialize>(
    value: &Value,
) -> Result<Option<Value>, String> {
    let typed: Option<T> = read(value)?;
    typed.map(|typed| serde_json::to_value(typed).map_err(|error| error.to_string())).transpose()
}

fn read<'a, T: Deserialize<'a>>(value: &'a Value) -> Result<T, String> {
    T::deserialize(value).map_err(|error| error.to_string())
}

fn in_field(name: &'static str) -> impl Fn(String) -> String {
    move |detail| format!("field `{name}`: {detail}")
}

fn put_description(out: &mut Map<String, Value>, description: Option<String>) {
    if let Some(description) = description {
        out.insert("description".to_owned(), description.into());
    }
}

/// `may_be_empty` allows an object without properties; a choice of types hands it on.
fn finish(node: Node, may_be_empty: bool) -> Result<Value, String> {
    let mut out = Map::new();
    match node {
        Node::Leaf(map) => out = map,
        Node::Array { items, description } => {
            out.insert("type".to_owned(), "array".into());
            out.insert("items".to_owned(), finish(*items, false)?);
            put_description(&mut out, description);
        }
        Node::AnyOf { choices, description } => {
            let choices = choices
                .into_iter()
                .map(|node| finish(node, may_be_empty))
                .collect::<Result<_, _>>()?;
            out.insert("anyOf".to_owned(), Value::Array(choices));
            put_description(&mut out, description);
        }
        Node::Object { properties, required, additional_properties, description, definitions } => {
            if properties.is_empty() && !may_be_empty {
                return Err("An object with no properties is not allowed.".to_owned());
            }
            let properties = finish_named(properties)?;
            let definitions = definitions.map(finish_named).transpose()?;
            check_required(required.as_deref(), &properties)?;
            if additional_properties == Some(true) {
                return Err("additionalProperties should not be true".to_owned());
            }
            let required = properties.keys().cloned().map(Value::String).collect();
            out.insert("type".to_owned(), "object".into());
            out.insert("properties".to_owned(), Value::Object(properties));
            out.insert("additionalProperties".to_owned(), false.into());
            out.insert("required".to_owned(), Value::Array(required));
            put_description(&mut out, description);
            if let Some(definitions) = definitions {
                out.insert("$def".to_owned(), Value::Object(definitions));
            }
        }
    }
    Ok(Value::Object(out))
}

fn finish_named(nodes: Vec<(String, Node)>) -> Result<Map<String, Value>, String> {
    nodes.into_iter().map(|(key, node)| Ok((key, finish(node, false)?))).collect()
}

fn check_required(
    required: Option<&[String]>,
    properties: &Map<String, Value>,
) -> Result<(), String> {
    let Some(required) = required else { return Ok(()) };
    let mut seen = std::collections::HashSet::new();
    for name in required {
        if !properties.contains_key(name) {
            return Err(format!("Required property '{name}' not found in object"));
        }
        if !seen.insert(name) {
            return Err(format!("Duplicate required property '{name}'"));
        }
    }
    if seen.len() != properties.len() {
        return Err("Required properties must match all properties in the object".to_owned());
    }
    Ok(())
}
