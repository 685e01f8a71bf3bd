//! The tool prompt, tool schemas and past tool calls; both templates share their shape.

use std::borrow::Cow;

use super::out::Out;
use crate::json::{Json, Style, write_string};
use crate::node::Node;
use crate::types::{Special, ToolCall, ToolDefinition};

/// What differs between the templates in the tags of tool calls.
pub struct Tags {
    /// The words after the Dsml token; V4.1 has a space before each.
    pub calls: &'static str,
    pub invoke: &'static str,
    pub parameter: &'static str,
    pub style: Style,
}

pub const V41: Tags =
    Tags { calls: " calls", invoke: " invoke", parameter: " parameter", style: Style::Py };
pub const V4: Tags =
    Tags { calls: "tool_calls", invoke: "invoke", parameter: "parameter", style: Style::Sp };

impl Tags {
    /// The explanation of tools up to the schemas. Model input that was fixed in training: a wire
    /// format, to be reproduced byte for byte.
    pub fn write_preamble(&self, out: &mut Out<'_>) {
        let Tags { calls, invoke, parameter, .. } = self;
        out.template(&format!(
            "## Tools\n\nYou have access to a set of tools to help answer the user's question. You \
             can invoke tools by writing a \"<⟦D⟧{calls}>\" block like the following:\n\n\
             <⟦D⟧{calls}>\n\
             <⟦D⟧{invoke} name=\"$TOOL_NAME\">\n\
             <⟦D⟧{parameter} name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE\
             </⟦D⟧{parameter}>\n\
             ...\n\
             </⟦D⟧{invoke}>\n\
             <⟦D⟧{invoke} name=\"$TOOL_NAME2\">\n\
             ...\n\
             </⟦D⟧{invoke}>\n\
             </⟦D⟧{calls}>\n\n\
             String parameters should be specified as is and set `string=\"true\"`. For all other \
             types (numbers, booleans, arrays, objects), pass the value in JSON format and set \
             `string=\"false\"`.\n\n\
             If thinking_mode is enabled (triggered by ⟦T⟧), you MUST output your complete \
             reasoning inside ⟦T⟧...⟦/T⟧ BEFORE any tool calls or final response.\n\n\
             Otherwise, output directly after ⟦/T⟧ with tool calls or final response.\n\n\
             ### Available Tool Schemas\n\n"
        ));
    }

    /// Writes the opening of the call block, as the answer that must call a tool begins.
    pub fn write_calls_start(&self, out: &mut Out<'_>) {
        out.plain("\n\n<");
        out.special(Special::Dsml);
        out.plain(self.calls);
        out.plain(">\n");
    }

    fn open(&self, out: &mut Out<'_>, tag: &str, name: &str) {
        out.plain("<");
        out.special(Special::Dsml);
        out.plain(tag);
        out.plain(" name=\"");
        out.plain(name);
    }

    fn close(&self, out: &mut Out<'_>, tag: &str) {
        out.plain("</");
        out.special(Special::Dsml);
        out.plain(tag);
        out.plain(">");
    }

    pub fn open_invoke(&self, out: &mut Out<'_>, name: &str) {
        self.open(out, self.invoke, name);
        out.plain("\">\n");
    }

    pub fn close_invoke(&self, out: &mut Out<'_>) {
        self.close(out, self.invoke);
    }

    pub fn close_calls(&self, out: &mut Out<'_>) {
        self.close(out, self.calls);
    }

    /// Writes one parameter: a string as its own text, anything else as JSON.
    fn write_parameter(&self, out: &mut Out<'_>, name: &str, value: Node<'_>) {
        self.open(out, self.parameter, name);
        if let Node::String(text) = &value {
            out.plain("\" string=\"true\">");
            out.plain(text);
        } else {
            out.plain("\" string=\"false\">");
            value.write(&mut out.prompt.text, self.style);
        }
        self.close(out, self.parameter);
    }

    /// Writes the parameters of a call, `between` two of them and `after` the last, if any.
    pub fn write_parameters(&self, out: &mut Out<'_>, call: &ToolCall, between: &str, after: &str) {
        let parameters = parameters(&call.arguments);
        let is_empty = parameters.is_empty();
        for (index, (name, value)) in parameters.into_iter().enumerate() {
            if index > 0 {
                out.plain(between);
            }
            self.write_parameter(out, &name, value);
        }
        if !is_empty {
            out.plain(after);
        }
    }

    pub fn write_schema(&self, out: &mut Out<'_>, tool: &ToolDefinition) {
        let text = &mut out.prompt.text;
        text.push_str("{\"name\": ");
        write_string(text, &tool.name);
        text.push_str(", \"description\": ");
        write_string(text, tool.description.as_deref().unwrap_or(""));
        text.push_str(", \"parameters\": ");
        tool.parameters.write(text, self.style);
        text.push('}');
    }
}

/// The closing sentence of the tool prompt.
pub const CLOSING: &str = "You MUST strictly follow the above defined tool name and parameter \
                           schemas to invoke tool calls.\n";

/// The heading of a response format's schema.
pub const RESPONSE_FORMAT: &str = "## Response Format:\n\nYou MUST strictly adhere to the following \
                                   schema to reply:\n";

/// The arguments as an object; text that is none becomes one parameter that holds it.
fn parameters(arguments: &str) -> Vec<(Cow<'_, str>, Node<'_>)> {
    match Node::parse(arguments.as_bytes()) {
        Ok(Node::Object(pairs)) => pairs,
        _ => vec![("arguments".into(), Node::String(arguments.into()))],
    }
}
