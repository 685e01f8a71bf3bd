//! Responses (recipe.md, section 8).

mod echo;
mod items;
mod tools;
pub mod wire;

use std::collections::HashMap;

use self::items::Walk;
use self::tools::Registry;
use self::wire::{ChosenTool, Format, Item, Request, Tool, ToolChoice, TypedItem};
use super::content::plain;
use super::format::{self, Formatted};
use super::sampling::{self, Sampling};
use super::schema::Checker;
use super::tools::{Choice, select};
use super::wire::TextOr;
use super::{Options, WebSearch, bad, mentions_json, reasoning, settle_carried_tools};
use crate::types::{
    Conversation, Error, Message, ModelVersion, Parsing, Request as Converted, ResponseFormat,
    ResponseOptions, Special, ThinkingStage, ToolChoice as ConversationChoice,
};

pub fn convert(request: Request, options: &Options) -> Result<Converted, Error> {
    let version = options.version_of(&request.model)?;
    let echo = echo::echo(&request);
    let declared = request.tools.unwrap_or_default();
    let top_level = declared.iter().filter_map(|tool| match tool {
        Tool::Function(function) => Some(function.name.clone()),
        _ => None,
    });
    let mut registry = Registry::new(version, options, top_level);
    for (index, tool) in declared.into_iter().enumerate() {
        registry.declare(tool, || format!("tools[{index}]"), false)?;
    }
    // What a tool search found is not part of the map: the client knows those names already.
    let namespaces = registry.namespaces.clone();
    let discovered = declare_discovered(&mut registry, request.input.as_ref(), version)?;

    let effort = request.reasoning.as_ref().and_then(|reasoning| reasoning.effort);
    let mode = sampling::mode(None, effort, options);
    let image_spelling = options.special_tokens.get(Special::Image);
    let mut walk = Walk::new(version, image_spelling, &mut registry, discovered);
    walk_input(&mut walk, request.instructions, request.input)?;
    let mut messages = walk.messages;

    let choice = request.tool_choice.unwrap_or(ToolChoice::Auto);
    // A tool search on the server, say, keeps none; a choice of none keeps all for this check.
    let keeps_tools = !registry.tools.is_empty();
    let field = "reasoning_text";
    reasoning::settle(&mut messages, mode.thinking, keeps_tools, field, options)?;
    let choice = resolve_choice(choice, options)?;
    let mut checker = Checker::default();
    let selection = select(
        registry.tools,
        choice,
        mode.thinking,
        options.strict_schema_keywords,
        &mut checker,
    )?;
    settle_carried_tools(&mut messages, &selection.tools);

    let text_format = request.text.map_or(Format::Text, |text| text.format);
    let is_text = matches!(text_format, Format::Text);
    let is_json_object = matches!(text_format, Format::JsonObject);
    let (response_format, format_constraint) =
        response_format(text_format, &messages, options, &mut checker)?;
    if selection.all_strict()? && !is_text {
        return Err(bad("response_format should not be used with tools"));
    }
    let parse_tool_calls = selection.is_active();
    let mut inference = sampling::resolve(
        Sampling {
            temperature: request.temperature,
            top_p: request.top_p,
            logprobs: request.top_logprobs.is_some(),
            top_logprobs: request.top_logprobs,
            max_tokens: request.max_output_tokens,
            ..Sampling::default()
        },
        version,
        mode.thinking,
        parse_tool_calls,
        options,
    )?;
    inference.output_constraint = selection.constraint().or(format_constraint);
    Ok(Converted {
        model_version: version,
        model: request.model,
        parsing: Parsing {
            parse_tool_calls,
            starts_in_tool_calls: selection.choice == ConversationChoice::Required,
            parse_json_output: is_json_object,
            thinking_initial_stage: mode.thinking.then_some(ThinkingStage::ReasoningStart),
            stop_sequences: Vec::new(),
        },
        inference,
        response: ResponseOptions::Responses {
            stream: request.stream.unwrap_or(false),
            echo,
            namespaces: Some(namespaces),
            custom_tools: registry.custom_tools,
            client_tool_search: registry.client_tool_search,
        },
        conversation: Conversation {
            messages,
            thinking_mode: mode.thinking,
            tools: selection.tools,
            tool_choice: selection.choice,
            reasoning_effort: mode.effort,
            response_format,
        },
    })
}

/// Declares what past tool searches found; returns the names by item index.
fn declare_discovered<K>(
    registry: &mut Registry<'_>,
    input: Option<&TextOr<Item, K>>,
    version: ModelVersion,
) -> Result<HashMap<usize, Vec<String>>, Error> {
    let mut discovered = HashMap::new();
    let Some(TextOr::List(items, _)) = input else { return Ok(discovered) };
    if version == ModelVersion::V4 {
        return Ok(discovered);
    }
    for (item_index, item) in items.iter().enumerate() {
        let Item::Typed(TypedItem::ToolSearchOutput { tools, .. }) = item else { continue };
        let first = registry.tools.len();
        for (index, tool) in tools.iter().enumerate() {
            let location = || format!("input[{item_index}].tools[{index}]");
            registry.declare(tool.clone(), location, true)?;
        }
        let names = registry.tools[first..].iter().map(|tool| tool.name.clone());
        discovered.insert(item_index, names.collect());
    }
    Ok(discovered)
}

fn walk_input<K>(
    walk: &mut Walk<'_, '_>,
    instructions: Option<String>,
    input: Option<TextOr<Item, K>>,
) -> Result<(), Error> {
    let instructions = instructions.filter(|text| !text.is_empty());
    if input.is_none() && instructions.is_none() {
        return Err(bad("Either input or instructions must be provided"));
    }
    if let Some(text) = instructions {
        let content = plain(text);
        walk.messages.push(Message::System { content, images: Vec::new(), tools: None });
    }
    match input {
        None => {}
        Some(TextOr::Text(text)) => {
            walk.messages.push(Message::User { content: plain(text), images: Vec::new() });
        }
        Some(TextOr::List(items, _)) => {
            if items.is_empty() {
                return Err(bad("Input items array must not be empty"));
            }
            for (index, item) in items.into_iter().enumerate() {
                walk.item(item, index)?;
            }
            walk.finish()?;
        }
    }
    Ok(())
}

fn resolve_choice(choice: ToolChoice, options: &Options) -> Result<Choice, Error> {
    Ok(match choice {
        ToolChoice::None => Choice::None,
        ToolChoice::Auto => Choice::Auto,
        ToolChoice::Required => Choice::Required,
        ToolChoice::Tool(ChosenTool::Function { name } | ChosenTool::Custom { name }) => {
            Choice::Named(name)
        }
        ToolChoice::Tool(ChosenTool::WebSearch | ChosenTool::WebSearch20250826) => {
            if options.responses_web_search == WebSearch::Reject {
                return Err(bad("Server tools are not supported"));
            }
            Choice::Auto
        }
    })
}

fn response_format(
    format: Format,
    messages: &[Message],
    options: &Options,
    checker: &mut Checker,
) -> Result<Formatted, Error> {
    Ok(match format {
        Format::Text => (ResponseFormat::Text, None),
        Format::JsonObject => {
            if !mentions_json(messages) {
                return Err(bad("Response input messages must contain the word 'json' in some \
                     form to use 'text.format' of type 'json_object'."));
            }
            format::json_object()
        }
        Format::JsonSchema { schema, strict, .. } => {
            format::json_schema(schema, strict, options.strict_schema_keywords, checker)?
        }
    })
}
