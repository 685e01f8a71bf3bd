//! Validity of the JSON Schemas that clients send (recipe.md, section 6.7).
//!
//! Most schemas use a handful of keywords and are judged by one walk. The others go to a full
//! validator, whose cost an attacker could choose: it is quadratic in the references of one schema
//! and compiles every pattern. A [`Checker`] therefore carries a budget for one request; past it
//! the meta-schema and the local references are still checked, in linear time, but patterns are no
//! longer compiled. Nothing matches them here: the grammar service judges those it uses.

use std::collections::HashSet;

use jsonschema::{Retrieve, Uri};
use serde_json::{Map, Value};

use super::bad;
use crate::types::Error;

const MAX_REFERENCES: usize = 2_000;
/// Patterns with counted repetition: up to 12 ms each.
const MAX_COUNTED_PATTERNS: usize = 64;
/// All other patterns: about 3 µs a byte.
const MAX_PATTERN_BYTES: usize = 64 * 1024;

/// Checks the schemas of one request within one budget.
#[derive(Debug, Default)]
pub struct Checker {
    num_references: usize,
    num_counted_patterns: usize,
    num_pattern_bytes: usize,
}

impl Checker {
    /// Checks the parameters of the non-strict tool `name`: a valid schema of type object.
    pub fn check_parameters(&mut self, schema: &Value, name: &str) -> Result<(), Error> {
        let refuse = |detail| bad(format!("Invalid schema for function '{name}': {detail}"));
        self.check(schema).map_err(refuse)?;
        let kind = schema.get("type").unwrap_or(&Value::Null);
        if kind.as_str() == Some("object") {
            return Ok(());
        }
        Err(refuse(format!(
            "schema must be a JSON Schema of 'type: \"object\"', got 'type: {kind}'."
        )))
    }

    /// Checks the schema of a non-strict response format.
    pub fn check_response_format(&mut self, schema: &Value) -> Result<(), Error> {
        self.check(schema).map_err(|detail| bad(format!("Invalid json schema: {detail}")))
    }

    fn check(&mut self, schema: &Value) -> Result<(), String> {
        if is_plainly_valid(schema, true) {
            return Ok(());
        }
        self.spend(schema);
        let is_affordable = self.num_references <= MAX_REFERENCES
            && self.num_counted_patterns <= MAX_COUNTED_PATTERNS
            && self.num_pattern_bytes <= MAX_PATTERN_BYTES;
        if is_affordable {
            return jsonschema::options()
                .with_retriever(NoRetrieval)
                .build(schema)
                .map(|_| ())
                .map_err(|error| error.to_string());
        }
        jsonschema::meta::validate(schema).map_err(|error| error.to_string())?;
        check_local_references(schema, schema)
    }

    /// Adds what the full validator would work on in `schema`.
    fn spend(&mut self, schema: &Value) {
        match schema {
            Value::Array(items) => items.iter().for_each(|item| self.spend(item)),
            Value::Object(map) => {
                for (key, value) in map {
                    match (key.as_str(), value) {
                        ("$ref" | "$dynamicRef" | "$recursiveRef", _) => self.num_references += 1,
                        ("pattern", Value::String(pattern)) => self.spend_pattern(pattern),
                        ("patternProperties", Value::Object(patterns)) => {
                            patterns.keys().for_each(|pattern| self.spend_pattern(pattern));
                        }
                        _ => {}
                    }
                    self.spend(value);
                }
            }
            _ => {}
        }
    }

    fn spend_pattern(&mut self, pattern: &str) {
        self.num_pattern_bytes += pattern.len();
        self.num_counted_patterns += usize::from(pattern.contains('{'));
    }
}

/// Schemas come from clients: nothing they name is ever fetched.
struct NoRetrieval;

impl Retrieve for NoRetrieval {
    fn retrieve(
        &self,
        uri: &Uri<String>,
    ) -> Result<Value, Box<dyn std::error::Error + Send + Sync>> {
        Err(format!("Retrieval is disabled, cannot fetch {uri}").into())
    }
}

fn check_local_references(schema: &Value, root: &Value) -> Result<(), String> {
    match schema {
        Value::Array(items) => items.iter().try_for_each(|item| check_local_references(item, root)),
        Value::Object(map) => {
            if let Some(Value::String(target)) = map.get("$ref") {
                let pointer = target
                    .strip_prefix('#')
                    .ok_or_else(|| format!("Retrieval is disabled, cannot fetch {target}"))?;
                if root.pointer(pointer).is_none() {
                    return Err(format!("Pointer '{pointer}' does not exist"));
                }
            }
            map.values().try_for_each(|value| check_local_references(value, root))
        }
        _ => Ok(()),
    }
}

/// Whether `schema` is valid by keywords whose rules are the same from draft 7 on.
///
/// A true answer implies that the full validator accepts; a false one says nothing.
fn is_plainly_valid(schema: &Value, is_root: bool) -> bool {
    match schema {
        Value::Bool(_) => true,
        Value::Object(map) => {
            map.iter().all(|(key, value)| is_plainly_valid_keyword(key, value, is_root))
        }
        _ => false,
    }
}

fn is_plainly_valid_keyword(key: &str, value: &Value, is_root: bool) -> bool {
    match key {
        "type" => is_type(value),
        "properties" | "$defs" | "definitions" => {
            value.as_object().is_some_and(|map: &Map<String, Value>| {
                map.values().all(|value| is_plainly_valid(value, false))
            })
        }
        "items" | "additionalProperties" | "not" | "propertyNames" => {
            is_plainly_valid(value, false)
        }
        "anyOf" | "oneOf" | "allOf" => value.as_array().is_some_and(|choices| {
            !choices.is_empty() && choices.iter().all(|choice| is_plainly_valid(choice, false))
        }),
        "required" => value.as_array().is_some_and(|names| are_distinct_strings(names)),
        "title" | "description" | "format" => value.is_string(),
        "enum" | "examples" => value.is_array(),
        "const" | "default" => true,
        "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => value.is_number(),
        "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties" => {
            value.is_u64()
        }
        "uniqueItems" => value.is_boolean(),
        "$schema" => {
            is_root
                && matches!(
                    value.as_str(),
                    Some(
                        "http://json-schema.org/draft-07/schema#"
                            | "https://json-schema.org/draft/2020-12/schema"
                    )
                )
        }
        _ => false,
    }
}

fn is_type(value: &Value) -> bool {
    let is_name = |value: &Value| {
        matches!(
            value.as_str(),
            Some("object" | "string" | "number" | "integer" | "boolean" | "array" | "null")
        )
    };
    match value {
        Value::Array(names) => {
            !names.is_empty() && names.iter().all(is_name) && are_distinct_strings(names)
        }
        name => is_name(name),
    }
}

fn are_distinct_strings(values: &[Value]) -> bool {
    let mut seen = HashSet::with_capacity(values.len());
    values.iter().all(|value| value.as_str().is_some_and(|text| seen.insert(text)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A small random schema, mostly of the plain keywords, sometimes wrong.
    fn random_schema(next: &mut impl FnMut(usize) -> usize, depth: usize) -> Value {
        let scalars = [json!(1), json!(-1), json!(1.5), json!("x"), json!(true), json!(null)];
        if depth == 0 {
            return [json!({}), json!(true), json!({"type": "string"})][next(3)].clone();
        }
        let mut map = Map::new();
        for _ in 0..next(4) {
            let key = [
                "type",
                "properties",
                "items",
                "anyOf",
                "required",
                "title",
                "enum",
                "const",
                "minimum",
                "minLength",
                "uniqueItems",
                "$schema",
                "additionalProperties",
                "$defs",
            ][next(14)];
            let value = match next(8) {
                0 => scalars[next(6)].clone(),
                1 => json!([scalars[next(6)], scalars[next(6)]]),
                2 => json!("object"),
                3 => json!(["object", "null"]),
                4 => json!({"p": random_schema(next, depth - 1)}),
                5 => json!([random_schema(next, depth - 1)]),
                6 => json!("http://json-schema.org/draft-07/schema#"),
                _ => random_schema(next, depth - 1),
            };
            map.insert(key.to_owned(), value);
        }
        Value::Object(map)
    }

    #[test]
    fn the_walk_never_accepts_what_the_full_validator_refuses() {
        let mut state = 7u64;
        let mut next = |bound: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % bound
        };
        let mut num_accepted = 0;
        for _ in 0..6_000 {
            let schema = random_schema(&mut next, 3);
            if is_plainly_valid(&schema, true) {
                num_accepted += 1;
                let full = jsonschema::options().with_retriever(NoRetrieval).build(&schema);
                assert!(full.is_ok(), "{schema}");
            }
        }
        assert!(num_accepted > 500, "the generator must reach the walk, got {num_accepted}");
    }

    #[test]
    fn a_chain_of_references_past_the_budget_is_still_resolved() {
        let mut definitions = Map::new();
        for index in 0..=MAX_REFERENCES {
            let next = format!("#/$defs/d{}", index + 1);
            definitions.insert(format!("d{index}"), json!({"$ref": next}));
        }
        let mut schema = json!({"type": "object", "$defs": definitions});
        let dangling = Checker::default().check_parameters(&schema, "f").expect_err("dangles");
        assert!(dangling.message.starts_with("Invalid schema for function 'f': Pointer"));
        schema["$defs"][format!("d{}", MAX_REFERENCES + 1)] = json!({});
        assert_eq!(Checker::default().check_parameters(&schema, "f"), Ok(()));
    }

    #[test]
    fn nothing_is_fetched() {
        let schema = json!({"type": "object", "$ref": "http://x/y"});
        let error = Checker::default().check_parameters(&schema, "f").expect_err("is remote");
        assert!(error.message.contains("Retrieval is disabled"), "{}", error.message);
    }
}
