//! Field types of a Responses request (recipe.md, sections 8.1, 8.2 and 8.4).

use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::convert::wire::{
    BlocksKind, DetailName, EffortName, InputKind, OutputKind, TextOr, tagged_by,
};
use crate::node::{FromNode, Node};

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub struct Request {
    pub model: String,
    /// Typed apart, for speed.
    #[serde(skip)]
    pub input: Option<TextOr<Item, InputKind>>,
    pub instructions: Option<String>,
    pub reasoning: Option<Reasoning>,
    pub text: Option<Text>,
    pub tools: Option<Vec<Tool>>,
    pub tool_choice: Option<ToolChoice>,
    pub max_output_tokens: Option<u32>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_logprobs: Option<u8>,
    pub stream: Option<bool>,
    pub user: Option<String>,
}

impl<'de> FromNode<'de> for Request {
    fn from_node(mut node: Node<'de>) -> Result<Self, serde_json::Error> {
        let input = node.take("input").filter(|input| *input != Node::Null);
        let mut request = Request::deserialize(node)?;
        request.input = input.map(TextOr::from_node).transpose()?;
        Ok(request)
    }
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub struct Reasoning {
    pub effort: Option<EffortName>,
    pub summary: Option<Summary>,
    pub generate_summary: Option<Summary>,
}

#[derive(Clone, Copy, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Summary {
    Auto,
    Concise,
    Detailed,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub struct Text {
    /// May be absent, but not null.
    #[serde(default)]
    pub format: Format,
    pub verbosity: Option<Level>,
}

#[derive(Clone, Copy, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    Low,
    Medium,
    High,
}

#[derive(Default, Deserialize)]
#[serde(expecting = "an object")]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Format {
    #[default]
    Text,
    JsonSchema {
        name: String,
        schema: Value,
        description: Option<String>,
        strict: Option<bool>,
    },
    JsonObject,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Execution {
    Client,
    Server,
}

#[derive(Clone, Deserialize)]
#[serde(expecting = "an object")]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Tool {
    Function(Function),
    Namespace {
        name: String,
        description: Option<String>,
        tools: Vec<InnerTool>,
    },
    Custom {
        name: String,
    },
    #[serde(rename = "tool_search")]
    Search {
        execution: Option<Execution>,
        description: Option<String>,
        parameters: Option<Value>,
    },
    WebSearch(WebSearch),
    #[serde(rename = "web_search_2025_08_26")]
    WebSearch20250826(WebSearch),
    #[serde(other)]
    Unknown,
}

#[derive(Clone, Deserialize)]
#[serde(expecting = "an object")]
pub struct Function {
    pub name: String,
    pub description: Option<String>,
    pub parameters: Option<Value>,
    pub strict: Option<bool>,
}

/// Carried only to be echoed.
#[derive(Clone, Deserialize)]
#[serde(expecting = "an object")]
pub struct WebSearch {
    pub search_context_size: Option<Level>,
    pub user_location: Option<UserLocation>,
}

#[derive(Clone, Deserialize, Serialize)]
#[serde(expecting = "an object")]
pub struct UserLocation {
    city: Option<String>,
    country: Option<String>,
    region: Option<String>,
    timezone: Option<String>,
}

#[derive(Clone, Deserialize)]
#[serde(expecting = "an object")]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum InnerTool {
    Function(Function),
    Custom { name: String },
}

pub enum ToolChoice {
    None,
    Auto,
    Required,
    Tool(ChosenTool),
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ChosenTool {
    Function {
        name: String,
    },
    WebSearch,
    #[serde(rename = "web_search_2025_08_26")]
    WebSearch20250826,
    Custom {
        name: String,
    },
}

impl<'de> Deserialize<'de> for ToolChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let other = || {
            D::Error::custom("expected one of `none`, `auto`, `required` or a tool choice object")
        };
        match Value::deserialize(deserializer)? {
            Value::String(word) => match word.as_str() {
                "none" => Ok(ToolChoice::None),
                "auto" => Ok(ToolChoice::Auto),
                "required" => Ok(ToolChoice::Required),
                _ => Err(other()),
            },
            Value::Object(map) if map.contains_key("type") => {
                ChosenTool::deserialize(Value::Object(map))
                    .map(ToolChoice::Tool)
                    .map_err(D::Error::custom)
            }
            _ => Err(other()),
        }
    }
}

/// An input item. One with a role and no type is a message.
pub enum Item {
    Message(InputMessage),
    Typed(TypedItem),
}

tagged_by!("type": TypedItem, Block, OutputBlock);

impl<'de> FromNode<'de> for Item {
    fn from_node(node: Node<'de>) -> Result<Self, serde_json::Error> {
        let kind = node.get("type");
        let is_message = matches!(kind, Some(Node::String(kind)) if kind == "message");
        if is_message || (kind.is_none() && node.get("role").is_some()) {
            InputMessage::from_node(node).map(Item::Message)
        } else if kind.is_some() {
            TypedItem::from_node(node).map(Item::Typed)
        } else {
            Err(serde_json::Error::custom("invalid input item"))
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TypedItem {
    Reasoning {
        content: Option<Vec<ReasoningText>>,
        /// Type-checked only.
        #[serde(rename = "encrypted_content")]
        _encrypted_content: Option<String>,
    },
    FunctionCall {
        call_id: String,
        name: String,
        arguments: String,
        namespace: Option<String>,
    },
    FunctionCallOutput {
        call_id: Option<String>,
        output: TextOr<OutputBlock, OutputKind>,
    },
    CustomToolCall {
        call_id: String,
        name: String,
        input: String,
    },
    CustomToolCallOutput {
        call_id: String,
        output: Option<TextOr<OutputBlock, OutputKind>>,
    },
    ToolSearchCall {
        call_id: String,
        arguments: Map<String, Value>,
        /// Type-checked only.
        #[serde(rename = "execution")]
        _execution: Option<Execution>,
    },
    ToolSearchOutput {
        call_id: String,
        tools: Vec<Tool>,
        /// Type-checked only.
        #[serde(rename = "execution")]
        _execution: Option<Execution>,
    },
    WebSearchCall,
    #[serde(other)]
    Unknown,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub struct ReasoningText {
    pub text: String,
}

pub struct InputMessage {
    pub role: Role,
    pub content: TextOr<Block, BlocksKind>,
}

impl<'de> FromNode<'de> for InputMessage {
    fn from_node(mut node: Node<'de>) -> Result<Self, serde_json::Error> {
        let missing = serde_json::Error::missing_field;
        let content = node.take("content");
        let role = node.take("role").ok_or_else(|| missing("role"))?;
        Ok(InputMessage {
            role: Role::deserialize(role)?,
            content: TextOr::from_node(content.ok_or_else(|| missing("content"))?)?,
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    User,
    Assistant,
    System,
    Developer,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Block {
    InputText { text: String },
    OutputText { text: String },
    InputImage(InputImage),
    InputFile {},
}

#[derive(Deserialize)]
pub enum OutputBlock {
    #[serde(rename = "input_text")]
    Text { text: String },
    #[serde(rename = "input_image")]
    Image(InputImage),
    #[serde(rename = "input_file")]
    File {},
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub struct InputImage {
    pub image_url: Option<String>,
    pub detail: Option<DetailName>,
    pub file_id: Option<String>,
}
