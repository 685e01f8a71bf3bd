//! The restricted schema grammar of `strict: true`, parsed and rewritten (recipe.md, section 6.7).
//!
//! Parsing walks a value that the JSON parser already bounded to 127 levels, so recursion is safe.
//!
//! The contract drops what the grammar of types does not know, and with it constraints that the
//! client asked for. [`StrictSchemaKeywords::Enforce`] leaves them in, for the grammar service to enforce or to
//! refuse by name.

use serde::Deserialize;
use serde_json::{Map, Number, Value};

use super::StrictSchemaKeywords;

/// What a strict schema belongs to; the two differ in texts and in one allowance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    ToolParameters,
    ResponseFormat,
}

/// Returns the schema with only the kept keywords, every property required and nothing additional.
///
/// Keywords that are kept to be enforced stand behind the known ones, as written; but definitions
/// are rewritten like any other node.
///
/// Errors: the sentence for the client.
pub fn rewrite(
    schema: &Value,
    subject: Subject,
    keywords: StrictSchemaKeywords,
) -> Result<Value, String> {
    let node = Parser { keywords }.parse(schema).map_err(|detail| match subject {
        Subject::ToolParameters => format!("Invalid tool parameters schema : {detail}"),
        Subject::ResponseFormat => format!("Invalid json schema: {detail}"),
    })?;
    let is_object = matches!(node.kind, Kind::Object { .. });
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

struct Node {
    kind: Kind,
    /// Kept beside those of the kind, in document order.
    others: Vec<(String, Other)>,
}

enum Other {
    AsWritten(Value),
    Definitions(Vec<(String, Node)>),
}

enum Kind {
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

#[derive(Clone, Copy)]
struct Parser {
    keywords: StrictSchemaKeywords,
}

impl Parser {
    fn parse(self, value: &Value) -> Result<Node, String> {
        let missing = "one of `type`, `anyOf`, `$ref` field is required";
        let map = value.as_object().ok_or(missing)?;
        match (map.get("type"), map.get("anyOf"), map.get("$ref")) {
            (Some(types @ Value::Array(_)), _, _) => self.type_list(map, types),
            (Some(_), _, _) => self.typed(value),
            (None, Some(choices), _) => self.any_of(map, choices),
            (None, None, Some(reference)) => {
                let target: String = read(reference).map_err(in_field("$ref"))?;
                let out = Map::from_iter([("$ref".to_owned(), target.into())]);
                self.node(map, &["$ref"], Kind::Leaf(out))
            }
            (None, None, None) => Err(missing.to_owned()),
        }
    }

    /// Adds what is kept of the keywords other than `known`.
    fn node(self, map: &Map<String, Value>, known: &[&str], kind: Kind) -> Result<Node, String> {
        if self.keywords == StrictSchemaKeywords::Drop {
            return Ok(Node { kind, others: Vec::new() });
        }
        let others = map.iter().filter(|(key, _)| !known.contains(&key.as_str()));
        let others = others
            .map(|(key, value)| {
                let other = match (key.as_str(), value) {
                    // A node that is reached by reference is as strict as one in its place.
                    ("$defs" | "definitions", Value::Object(_)) => {
                        Other::Definitions(self.named(value)?.unwrap_or_default())
                    }
                    _ => Other::AsWritten(value.clone()),
                };
                Ok((key.clone(), other))
            })
            .collect::<Result<_, String>>()?;
        Ok(Node { kind, others })
    }

    fn type_list(self, map: &Map<String, Value>, types: &Value) -> Result<Node, String> {
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
        self.node(map, &["type", "description"], Kind::Leaf(out))
    }

    fn any_of(self, map: &Map<String, Value>, choices: &Value) -> Result<Node, String> {
        let Value::Array(choices) = choices else {
            return Err(in_field("anyOf")(read::<Vec<Value>>(choices).err().unwrap_or_default()));
        };
        let choices = choices
            .iter()
            .map(|choice| self.typed(choice))
            .collect::<Result<Vec<_>, _>>()
            .map_err(in_field("anyOf"))?;
        let kind = Kind::AnyOf { choices, description: described(map)? };
        self.node(map, &["anyOf", "description"], kind)
    }

    /// Parses a node that names its one type. Fields are read in the order the client wrote them,
    /// so the first bad one is reported.
    fn typed(self, value: &Value) -> Result<Node, String> {
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
            "object" => self.object(map),
            "array" => self.array(map),
            "string" => self.leaf(
                map,
                &[
                    ("description", keep::<String>),
                    ("pattern", keep::<String>),
                    ("format", keep::<StringFormat>),
                    ("enum", keep::<Vec<String>>),
                ],
            ),
            "number" => self.leaf(map, &numeric_fields(keep::<Number>)),
            "integer" => self.leaf(map, &numeric_fields(keep::<i64>)),
            "boolean" | "null" => self.leaf(map, &[("description", keep::<String>)]),
            unknown => Err(format!(
                "unknown variant `{unknown}`, expected one of `object`, `string`, `number`, \
                 `integer`, `boolean`, `array`, `null`"
            )),
        }
    }

    fn object(self, map: &Map<String, Value>) -> Result<Node, String> {
        let (mut properties, mut required, mut definitions) = (Vec::new(), None, None);
        let (mut additional_properties, mut description) = (None, None);
        for (key, value) in map {
            match key.as_str() {
                "properties" => properties = self.named(value)?.unwrap_or_default(),
                "$def" => definitions = self.named(value)?,
                "required" => required = read(value)?,
                "additionalProperties" => additional_properties = read(value)?,
                "description" => description = read(value)?,
                _ => {}
            }
        }
        let known =
            ["type", "properties", "$def", "required", "additionalProperties", "description"];
        let kind =
            Kind::Object { properties, required, additional_properties, description, definitions };
        self.node(map, &known, kind)
    }

    fn named(self, value: &Value) -> Result<Option<Vec<(String, Node)>>, String> {
        match value {
            Value::Null => Ok(None),
            Value::Object(map) => map
                .iter()
                .map(|(key, value)| Ok((key.clone(), self.parse(value)?)))
                .collect::<Result<_, _>>()
                .map(Some),
            other => Err(read::<Map<String, Value>>(other).err().unwrap_or_default()),
        }
    }

    fn array(self, map: &Map<String, Value>) -> Result<Node, String> {
        let (mut items, mut description) = (None, None);
        for (key, value) in map {
            match key.as_str() {
                "items" => items = Some(self.parse(value)?),
                "description" => description = read(value)?,
                _ => {}
            }
        }
        let items = Box::new(items.ok_or("missing field `items`")?);
        self.node(map, &["type", "items", "description"], Kind::Array { items, description })
    }

    /// Checks the known fields in document order and writes them in the order of `fields`.
    fn leaf(self, map: &Map<String, Value>, fields: &[(&str, Reader)]) -> Result<Node, String> {
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
        let mut known = vec!["type"];
        known.extend(fields.iter().map(|(name, _)| *name));
        self.node(map, &known, Kind::Leaf(out))
    }
}

fn described(map: &Map<String, Value>) -> Result<Option<String>, String> {
    map.get("description").map_or(Ok(None), read).map_err(in_field("description"))
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
    match node.kind {
        Kind::Leaf(map) => out = map,
        Kind::Array { items, description } => {
            out.insert("type".to_owned(), "array".into());
            out.insert("items".to_owned(), finish(*items, false)?);
            put_description(&mut out, description);
        }
        Kind::AnyOf { choices, description } => {
            let choices = choices
                .into_iter()
                .map(|node| finish(node, may_be_empty))
                .collect::<Result<_, _>>()?;
            out.insert("anyOf".to_owned(), Value::Array(choices));
            put_description(&mut out, description);
        }
        Kind::Object { properties, required, additional_properties, description, definitions } => {
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
    for (key, other) in node.others {
        let value = match other {
            Other::AsWritten(value) => value,
            Other::Definitions(nodes) => Value::Object(finish_named(nodes)?),
        };
        out.insert(key, value);
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
