//! Field types that several protocols share (recipe.md, section 6.2).

use std::marker::PhantomData;

use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};
use serde_json::Error;

use crate::node::{self, FromNode, Node};
use crate::types::Detail as ImageDetail;

/// A field that is a string or a list, chosen by its JSON kind.
#[derive(Debug)]
pub enum TextOr<T, M> {
    Text(String),
    List(Vec<T>, PhantomData<M>),
}

/// The refusal of a [`TextOr`] of another kind.
pub trait KindError {
    const TEXT: &'static str;
}

macro_rules! kind_error {
    ($name:ident, $text:literal) => {
        #[derive(Debug)]
        pub struct $name;
        impl KindError for $name {
            const TEXT: &'static str = $text;
        }
    };
}
kind_error!(ContentKind, "content should be a string or a list");
kind_error!(BlocksKind, "content should be a string or a list of content blocks");
kind_error!(PlainKind, "expected a string or a list");
kind_error!(OutputKind, "output should be a string or a list of output content parts");
kind_error!(InputKind, "input should be a string or a list of input items");

impl<'de, T: FromNode<'de>, M: KindError> Deserialize<'de> for TextOr<T, M> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::from_node(Node::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl<'de, T: FromNode<'de>, M: KindError> FromNode<'de> for TextOr<T, M> {
    fn from_node(node: Node<'de>) -> Result<Self, Error> {
        match node {
            Node::String(text) => Ok(TextOr::Text(text.into_owned())),
            list @ Node::Array(_) => node::list(list).map(|items| TextOr::List(items, PhantomData)),
            _ => Err(Error::custom(M::TEXT)),
        }
    }
}

/// Makes an enum typed by the field that names its variant, with [`node::tagged`].
macro_rules! tagged_by {
    ($tag:literal: $($name:ident),+) => {$(
        impl<'de> $crate::node::FromNode<'de> for $name {
            fn from_node(node: $crate::node::Node<'de>) -> Result<Self, serde_json::Error> {
                $crate::node::tagged(node, $tag)
            }
        }
    )+};
}
pub(crate) use tagged_by;

/// The one legal `type` of Chat tools and tool calls.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FunctionType {
    Function,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ThinkingType {
    Adaptive,
    Enabled,
    Disabled,
}

#[derive(Debug, Deserialize)]
#[serde(expecting = "an object")]
pub struct Thinking {
    #[serde(rename = "type")]
    pub kind: ThinkingType,
    /// Type-checked; the budget has no effect.
    #[serde(rename = "budget_tokens")]
    _budget_tokens: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EffortName {
    None,
    Minimal,
    Low,
    Medium,
    High,
    Xhigh,
    Ultra,
    Max,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DetailName {
    Low,
    High,
    Original,
    Auto,
}

/// The detail of an image block; `high` when the client names none.
pub fn detail(name: Option<DetailName>) -> ImageDetail {
    match name {
        Some(DetailName::Low) => ImageDetail::Low,
        Some(DetailName::High) | None => ImageDetail::High,
        Some(DetailName::Original) => ImageDetail::Original,
        Some(DetailName::Auto) => ImageDetail::Auto,
    }
}
