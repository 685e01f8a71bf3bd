//! Client tools: names, choice, and the constraint for the grammar service (6.6 and 6.8).

use std::collections::HashSet;

use serde_json::Value;

use super::sampling::empty_string;
use super::schema::Checker;
use super::strict::{self, Subject};
use super::{StrictSchemaKeywords, bad};

use crate::json::{Json, Style, write_string};
use crate::types::{Error, OutputConstraint, ToolChoice, ToolDefinition};

const MAX_NAME_BYTES: usize = 128;

/// A tool as declared, before its schema is checked.
#[derive(Debug)]
pub struct ClientTool {
    pub name: String,
    pub description: Option<String>,
    pub parameters: Option<Value>,
    pub strict: Option<bool>,
    pub defer_loading: bool,
}

/// What the client asked to be called.
#[derive(Debug, PartialEq, Eq)]
pub enum Choice {
    Auto,
    None,
    Required,
    Named(String),
}

/// The tools that stay, in normalised form, and what of the choice remains.
#[derive(Debug)]
pub struct Selection {
    pub tools: Vec<ToolDefinition>,
    pub choice: ToolChoice,
}

impl Selection {
    /// Whether the model may call a tool.
    pub fn is_active(&self) -> bool {
        !self.tools.is_empty() && self.choice != ToolChoice::None
    }

    /// Whether every kept tool is strict. Refuses a mix.
    pub fn all_strict(&self) -> Result<bool, Error> {
        let num_strict = self.tools.iter().filter(|tool| tool.strict == Some(true)).count();
        if num_strict > 0 && num_strict < self.tools.len() {
            return Err(bad("Cannot use strict tool with non-strict tool in the same request"));
        }
        Ok(num_strict > 0)
    }

    /// The constraint that calls of these tools must follow; `None` without active tools.
    pub fn constraint(&self) -> Option<OutputConstraint> {
        self.is_active().then(|| OutputConstraint {
            kind: if self.choice == ToolChoice::Required {
                "tool_call_required"
            } else {
                "tool_call"
            },
            schema: tool_list(&self.tools),
        })
    }
}

/// Checks one tool name. `location` is the place of its declaration.
pub fn check_name(name: &str, location: impl Fn() -> String) -> Result<(), Error> {
    if name.is_empty() {
        return Err(empty_string(&format!("{}.name", location())));
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(bad(format!(
            "Invalid '{}.name': string too long. Expected a string with maximum length \
             {MAX_NAME_BYTES}, but got a string with length {} instead.",
            location(),
            name.len()
        )));
    }
    if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-') {
        return Err(bad(format!(
            "Invalid '{}.name': string does not match pattern. Expected a string that matches the \
             pattern '^[a-zA-Z0-9_-]+$'.",
            location()
        )));
    }
    Ok(())
}

/// Checks the declarations against each other and against the choice, and normalises them.
///
/// `keywords` says what the constraint of a strict tool holds.
pub fn select(
    declared: Vec<ClientTool>,
    choice: Choice,
    thinking: bool,
    keywords: StrictSchemaKeywords,
    checker: &mut Checker,
) -> Result<Selection, Error> {
    if choice == Choice::None {
        return Ok(Selection { tools: Vec::new(), choice: ToolChoice::None });
    }
    if declared.is_empty() {
        return Ok(Selection { tools: Vec::new(), choice: ToolChoice::Auto });
    }
    let mut names = HashSet::with_capacity(declared.len());
    let mut tools = Vec::with_capacity(declared.len());
    for tool in declared {
        if !names.insert(tool.name.clone()) {
            return Err(bad("Tool names must be unique."));
        }
        let mut enforced_parameters = None;
        let parameters = match (tool.parameters, tool.strict) {
            (Some(parameters), Some(true)) => {
                let rewrite =
                    |keywords| strict::rewrite(&parameters, Subject::ToolParameters, keywords);
                let shown = rewrite(StrictSchemaKeywords::Drop).map_err(bad)?;
                if keywords == StrictSchemaKeywords::Enforce {
                    enforced_parameters = Some(rewrite(keywords).map_err(bad)?);
                }
                shown
            }
            (None, Some(true)) => strict::empty_parameters(),
            (Some(parameters), _) => {
                checker.check_parameters(&parameters, &tool.name)?;
                parameters
            }
            (None, _) => Value::Object(serde_json::Map::new()),
        };
        tools.push(ToolDefinition {
            name: tool.name,
            description: tool.description,
            parameters,
            enforced_parameters,
            strict: tool.strict,
            defer_loading: tool.defer_loading,
        });
    }
    if let Choice::Named(name) = &choice {
        if !names.contains(name) {
            return Err(unknown_choice(name));
        }
        tools.retain(|tool| tool.name == *name);
    }
    if choice == Choice::Auto {
        return Ok(Selection { tools, choice: ToolChoice::Auto });
    }
    if thinking {
        return Err(bad("Thinking mode does not support this tool_choice"));
    }
    Ok(Selection { tools, choice: ToolChoice::Required })
}

/// The refusal of a choice that names no declared tool.
pub fn unknown_choice(name: &str) -> Error {
    bad(format!(
        "Invalid value for 'tool_call': no function named '{name}' was specified in the 'tools' \
         parameter."
    ))
}

/// The tools as a compact JSON array of Chat function tools.
fn tool_list(tools: &[ToolDefinition]) -> String {
    let mut out = String::from("[");
    for (index, tool) in tools.iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        out.push_str("{\"type\":\"function\",\"function\":{\"name\":");
        write_string(&mut out, &tool.name);
        out.push_str(",\"description\":");
        match &tool.description {
            Some(description) => write_string(&mut out, description),
            None => out.push_str("null"),
        }
        out.push_str(",\"parameters\":");
        let parameters = tool.enforced_parameters.as_ref().unwrap_or(&tool.parameters);
        parameters.write(&mut out, Style::Compact);
        out.push_str(",\"strict\":");
        out.push_str(match tool.strict {
            None => "null",
            Some(true) => "true",
            Some(false) => "false",
        });
        out.push('}');
        if tool.defer_loading {
            out.push_str(",\"defer_loading\":true");
        }
        out.push('}');
    }
    out.push(']');
    out
}
