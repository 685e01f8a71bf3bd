//! Response formats and their constraints (recipe.md, section 6.8).

use serde_json::Value;

use super::schema::Checker;
use super::strict::{self, Subject};
use super::{StrictSchemaKeywords, bad};
use crate::json::{Style, to_string};
use crate::types::{Error, OutputConstraint, ResponseFormat};

/// What the prompt shows, and what constrains the output.
pub type Formatted = (ResponseFormat, Option<OutputConstraint>);

pub fn json_object() -> Formatted {
    let constraint = OutputConstraint { kind: "json", schema: String::new() };
    (ResponseFormat::JsonObject, Some(constraint))
}

pub fn regex(pattern: String) -> Formatted {
    let constraint = OutputConstraint { kind: "regex", schema: pattern.clone() };
    (ResponseFormat::Regex(pattern), Some(constraint))
}

/// The prompt shows the schema as written; the constraint holds the rewritten one when strict.
pub fn json_schema(
    schema: Value,
    strict: Option<bool>,
    keywords: StrictSchemaKeywords,
    checker: &mut Checker,
) -> Result<Formatted, Error> {
    let schema_text = if strict == Some(true) {
        let rewritten = strict::rewrite(&schema, Subject::ResponseFormat, keywords).map_err(bad)?;
        to_string(&rewritten, Style::Compact)
    } else {
        checker.check_response_format(&schema)?;
        to_string(&schema, Style::Compact)
    };
    let constraint = OutputConstraint { kind: "json", schema: schema_text };
    Ok((ResponseFormat::JsonSchema(schema), Some(constraint)))
}
