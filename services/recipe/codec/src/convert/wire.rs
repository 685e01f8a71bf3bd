//! Field types that several protocols share (recipe.md, section 6.2).

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize as DeriveDeserialize;
use serde::de::{self, Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

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

impl<'de, T: Deserialize<'de>, M: KindError> Deserialize<'de> for TextOr<T, M> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Kind<T, M>(PhantomData<(T, M)>);
        impl<'de, T: Deserialize<'de>, M: KindError> Visitor<'de> for Kind<T, M> {
            type Value = TextOr<T, M>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(M::TEXT)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(TextOr::Text(text.to_owned()))
            }

            fn visit_string<E: de::Error>(self, text: String) -> Result<Self::Value, E> {
                Ok(TextOr::Text(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
                let mut list = Vec::with_capacity(items.size_hint().unwrap_or(0).min(4096));
                while let Some(item) = items.next_element()? {
                    list.push(item);
                }
                Ok(TextOr::List(list, PhantomData))
            }

            fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<Self::Value, A::Error> {
                Err(A::Error::custom(M::TEXT))
            }

            fn visit_bool<E: de::Error>(self, _: bool) -> Result<Self::Value, E> {
                Err(E::custom(M::TEXT))
            }

            fn visit_i64<E: de::Error>(self, _: i64) -> Result<Self::Value, E> {
                Err(E::custom(M::TEXT))
            }

            fn visit_u64<E: de::Error>(self, _: u64) -> Result<Self::Value, E> {
                Err(E::custom(M::TEXT))
            }

            fn visit_f64<E: de::Error>(self, _: f64) -> Result<Self::Value, E> {
                Err(E::custom(M::TEXT))
            }

            fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
                Err(E::custom(M::TEXT))
            }
        }
        deserializer.deserialize_any(Kind(PhantomData))
    }
}

/// The one legal `type` of Chat tools and tool calls.
#[derive(Debug, DeriveDeserialize)]
#[serde(rename_all = "snake_case")]
pub enum FunctionType {
    Function,
}

#[derive(Debug, DeriveDeserialize)]
#[serde(rename_all = "snake_case")]
pub enum ThinkingType {
    Adaptive,
    Enabled,
    Disabled,
}

#[derive(Debug, DeriveDeserialize)]
pub struct Thinking {
    #[serde(rename = "type")]
    pub kind: ThinkingType,
    /// Type-checked; the budget has no effect.
    #[serde(rename = "budget_tokens")]
    _budget_tokens: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize)]
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

impl EffortName {
    pub fn as_str(self) -> &'static str {
        match self {
            EffortName::None => "none",
            EffortName::Minimal => "minimal",
            EffortName::Low => "low",
            EffortName::Medium => "medium",
            EffortName::High => "high",
            EffortName::Xhigh => "xhigh",
            EffortName::Ultra => "ultra",
            EffortName::Max => "max",
        }
    }
}

#[derive(Clone, Copy, Debug, DeriveDeserialize)]
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
