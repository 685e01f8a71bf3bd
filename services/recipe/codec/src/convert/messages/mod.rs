//! Messages (recipe.md, section 9).

mod walk;
pub mod wire;

use std::collections::HashSet;

use self::walk::Walk;
use self::wire::{Request, SystemBlock, Tool, ToolChoice};
use super::content::plain;
use super::sampling::{self, Sampling, check_stops};
use super::schema::Checker;
use super::tools::{Choice, ClientTool, check_name, select, unknown_choice};
use super::wire::{PlainKind, TextOr};
use super::{Options, WebSearch, bad, reasoning, settle_carried_tools};
use crate::types::{
    Conversation, Error, Message, ModelVersion, Parsing, Request as Converted, ResponseFormat,
    ResponseOptions, ThinkingStage, ToolChoice as ConversationChoice,
};

pub fn convert(request: Request, options: &Options) -> Result<Converted, Error> {
    let version = options.version_of(&request.model)?;
    let Declared { tools, dropped } =
        declared_tools(request.tools.unwrap_or_default(), version, options)?;
    let effort = request.output_config.and_then(|config| config.effort);
    let mode = sampling::mode(request.thinking.as_ref(), effort, options);

    let names: HashSet<String> = tools.iter().map(|tool| tool.name.clone()).collect();
    let mut walk = Walk::new(version, options, &names);
    walk.messages.extend(request.system.map(system_message));
    walk.run(request.messages)?;
    let mut messages = walk.messages;
    let field = "content[].thinking";
    reasoning::settle(&mut messages, mode.thinking, !tools.is_empty(), field, options)?;
    let choice = match request.tool_choice {
        None | Some(ToolChoice::Auto { .. } | ToolChoice::Any { .. }) => Choice::Auto,
        Some(ToolChoice::None) => Choice::None,
        Some(ToolChoice::Tool { name, .. }) if dropped.contains(&name) => Choice::Auto,
        Some(ToolChoice::Tool { name, .. }) => Choice::Named(name),
    };
    if tools.is_empty()
        && !dropped.is_empty()
        && let Choice::Named(name) = &choice
    {
        return Err(unknown_choice(name));
    }
    let selection = select(
        tools,
        choice,
        mode.thinking,
        options.strict_schema_keywords,
        &mut Checker::default(),
    )?;
    settle_carried_tools(&mut messages, &selection.tools);
    let stop_sequences = request.stop_sequences.unwrap_or_default();
    check_stops(&stop_sequences)?;
    let parse_tool_calls = selection.is_active();
    let mut inference = sampling::resolve(
        Sampling {
            temperature: request.temperature,
            top_p: request.top_p,
            max_tokens: request.max_tokens,
            clamps_max_tokens: true,
            ..Sampling::default()
        },
        version,
        mode.thinking,
        parse_tool_calls,
        options,
    )?;
    inference.output_constraint = selection.constraint();
    Ok(Converted {
        model_version: version,
        model: request.model,
        parsing: Parsing {
            parse_tool_calls,
            starts_in_tool_calls: selection.choice == ConversationChoice::Required,
            parse_json_output: false,
            thinking_initial_stage: mode.thinking.then_some(ThinkingStage::ReasoningStart),
            stop_sequences,
        },
        inference,
        response: ResponseOptions::Messages { stream: request.stream.unwrap_or(false) },
        conversation: Conversation {
            messages,
            thinking_mode: mode.thinking,
            tools: selection.tools,
            tool_choice: selection.choice,
            reasoning_effort: mode.effort,
            response_format: ResponseFormat::Text,
        },
    })
}

struct Declared {
    tools: Vec<ClientTool>,
    /// Names of the web-search tools that were dropped: a choice of one becomes auto.
    dropped: HashSet<String>,
}

fn declared_tools(
    declared: Vec<Tool>,
    version: ModelVersion,
    options: &Options,
) -> Result<Declared, Error> {
    let mut tools = Vec::with_capacity(declared.len());
    let mut dropped = HashSet::new();
    for (index, tool) in declared.into_iter().enumerate() {
        match tool {
            Tool::Client(tool) => {
                check_name(&tool.name, || format!("tools[{index}]"))?;
                tools.push(ClientTool {
                    name: tool.name,
                    description: tool.description,
                    parameters: Some(tool.input_schema),
                    strict: None,
                    defer_loading: version == ModelVersion::V41
                        && tool.defer_loading.unwrap_or(false),
                });
            }
            Tool::Server(tool)
                if tool.kind.starts_with("web_search")
                    && options.messages_web_search == WebSearch::Drop =>
            {
                dropped.insert(tool.name.unwrap_or_else(|| "web_search".to_owned()));
            }
            Tool::Server(_) => {
                return Err(bad(format!("tools[{index}]: server tools are not supported")));
            }
        }
    }
    if !tools.is_empty() && tools.iter().all(|tool| tool.defer_loading) {
        return Err(bad(
            "tools: at least one tool must have defer_loading=false. All tools cannot \
             be deferred.",
        ));
    }
    Ok(Declared { tools, dropped })
}

fn system_message(system: TextOr<SystemBlock, PlainKind>) -> Message {
    const BILLING: &str = "x-anthropic-billing-header";
    let text = match system {
        TextOr::Text(text) => text,
        TextOr::List(blocks, _) => {
            let texts: Vec<String> =
                blocks.into_iter().map(|SystemBlock::Text { text }| text).collect();
            let is_billing = texts
                .first()
                .and_then(|text| text.get(..BILLING.len()))
                .is_some_and(|start| start.eq_ignore_ascii_case(BILLING));
            texts[usize::from(is_billing)..].join("\n\n")
        }
    };
    Message::System { content: plain(text), images: Vec::new(), tools: None }
}
