//! The request fields that a response object shows again (recipe.md, section 15.3).

use serde_json::{Map, Value, json};

use super::tools::reported;
use super::wire::{ChosenTool, Format, Request, ToolChoice};

/// Returns the echoed fields with absent ones as null or as their defaults.
pub fn echo(request: &Request) -> Map<String, Value> {
    let reasoning = request.reasoning.as_ref();
    let summary = reasoning.and_then(|reasoning| reasoning.summary.or(reasoning.generate_summary));
    let text = request.text.as_ref();
    let format = text.map_or(&Format::Text, |text| &text.format);
    let tools = request.tools.as_deref().unwrap_or_default();
    let fields = [
        ("instructions", json!(request.instructions)),
        ("max_output_tokens", json!(request.max_output_tokens)),
        (
            "reasoning",
            json!({
                "effort": reasoning.and_then(|reasoning| reasoning.effort),
                "summary": summary,
            }),
        ),
        ("temperature", single(request.temperature.unwrap_or(1.0))),
        (
            "text",
            json!({
                "format": format_value(format),
                "verbosity": text.and_then(|text| text.verbosity),
            }),
        ),
        ("tool_choice", request.tool_choice.as_ref().map_or_else(|| "auto".into(), choice_value)),
        ("tools", Value::Array(tools.iter().filter_map(reported).collect())),
        ("top_logprobs", json!(request.top_logprobs.unwrap_or(0))),
        ("top_p", single(request.top_p.unwrap_or(1.0))),
        ("user", json!(request.user)),
    ];
    fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// A single-precision number that prints with its own shortest digits, not those of the double
/// nearest to it.
fn single(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

fn format_value(format: &Format) -> Value {
    match format {
        Format::Text => json!({"type": "text"}),
        Format::JsonObject => json!({"type": "json_object"}),
        Format::JsonSchema { name, schema, description, strict } => json!({
            "type": "json_schema",
            "name": name,
            "schema": schema,
            "description": description,
            "strict": strict,
        }),
    }
}

fn choice_value(choice: &ToolChoice) -> Value {
    match choice {
        ToolChoice::None => "none".into(),
        ToolChoice::Auto => "auto".into(),
        ToolChoice::Required => "required".into(),
        ToolChoice::Tool(ChosenTool::Function { name }) => {
            json!({"type": "function", "name": name})
        }
        ToolChoice::Tool(ChosenTool::Custom { name }) => json!({"type": "custom", "name": name}),
        ToolChoice::Tool(ChosenTool::WebSearch) => json!({"type": "web_search"}),
        ToolChoice::Tool(ChosenTool::WebSearch20250826) => {
            json!({"type": "web_search_2025_08_26"})
        }
    }
}
