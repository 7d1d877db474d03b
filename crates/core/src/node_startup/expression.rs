//! Evidence written in CEL: `node.conditions['GPUReady'] == 'True' && pods.all(p, p.ready)`.
//!
//! Guarantees: an expression is compiled once, sees only the facts below, has no clock and no way out.
//! Assumptions: whoever may write rules may slow us down a little, not bring us down. So length, depth and loops in
//! loops are bounded, and a panic inside the interpreter is an error like any other.
//! Caveats: parser and interpreter recurse, and a stack that overflows takes the process along. A bracket costs the
//! parser up to 50 KB, so it gets a thread with room; an operator costs the interpreter up to 25 KB (both without
//! optimisation), so what it may meet later is measured before it is accepted.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cel::common::ast::{EntryExpr, Expr};
use cel::{Context, IdedExpr, Program, Value};
use serde::Serialize;

use super::{DaemonPod, NodeFacts, Seen};
use crate::selector::Labels;

/// As long as the CRD's schema allows.
pub const MAX_LENGTH: usize = 1024;
/// A loop in a loop over a node's pods is a few thousand steps; one more level would be hundreds of thousands.
const MAX_LOOPS: usize = 2;
/// An expression this deep needs less than half of the 2 MiB that threads get by default.
const MAX_DEPTH: usize = 24;
/// Enough for [`MAX_LENGTH`] opening brackets.
const PARSER_STACK: usize = 64 << 20;
const VARIABLES: [&str; 2] = ["node", "pods"];

/// A compiled expression; equal when its text is.
#[derive(Clone)]
pub struct Expression {
    text: Arc<str>,
    program: Arc<Program>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("the expression is longer than {MAX_LENGTH} characters")]
    Long,
    #[error("the expression does not parse: {0}")]
    Syntax(String),
    #[error("the expression uses {0:?}; it may use node and pods")]
    Unknown(String),
    #[error("the expression has more than {MAX_LOOPS} loops in each other")]
    Loops,
    #[error("the expression is more than {MAX_DEPTH} operations deep")]
    Deep,
}

/// Why an expression gave no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failed {
    #[error("{0}")]
    Evaluation(String),
    #[error("it must give true or false")]
    NotBoolean,
}

impl Expression {
    pub fn compile(text: &str) -> Result<Self, Invalid> {
        if text.len() > MAX_LENGTH {
            return Err(Invalid::Long);
        }
        let program = std::thread::scope(|scope| {
            let parser = std::thread::Builder::new().stack_size(PARSER_STACK);
            let gave_up = || Invalid::Syntax("the parser gave up".to_owned());
            let running = parser.spawn_scoped(scope, || parse(text)).map_err(|_| gave_up())?;
            running.join().unwrap_or_else(|_| Err(gave_up()))
        })?;
        Ok(Self { text: text.into(), program: Arc::new(program) })
    }

    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    pub fn holds(&self, seen: &Seen<'_>) -> Result<bool, Failed> {
        let evaluate = || {
            let mut context = Context::default();
            let failed = |e: &dyn std::fmt::Display| Failed::Evaluation(one_line(&e.to_string()));
            context.add_variable("node", NodeView::of(seen.node)).map_err(|e| failed(&e))?;
            let pods: Vec<PodView<'_>> = seen.pods.iter().map(|p| PodView::of(p, seen.node)).collect();
            context.add_variable("pods", pods).map_err(|e| failed(&e))?;
            self.program.execute(&context).map_err(|e| failed(&e))
        };
        let panicked = |_| Err(Failed::Evaluation("the interpreter gave up".to_owned()));
        match catch_unwind(AssertUnwindSafe(evaluate)).unwrap_or_else(panicked)? {
            Value::Bool(holds) => Ok(holds),
            _ => Err(Failed::NotBoolean),
        }
    }
}

impl PartialEq for Expression {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl std::fmt::Debug for Expression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Expression").field(&self.text).finish()
    }
}

/// `node` in an expression.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeView<'a> {
    name: &'a str,
    labels: &'a Labels,
    annotations: &'a Labels,
    conditions: &'a Labels,
    taints: Vec<TaintView<'a>>,
}

#[derive(Serialize)]
struct TaintView<'a> {
    key: &'a str,
    value: &'a str,
    effect: &'a str,
}

impl<'a> NodeView<'a> {
    fn of(node: &'a NodeFacts) -> Self {
        let view = |t: &'a super::Taint| TaintView {
            key: &t.key,
            value: t.value.as_deref().unwrap_or_default(),
            effect: &t.effect,
        };
        Self {
            name: &node.name,
            labels: &node.labels,
            annotations: &node.annotations,
            conditions: &node.conditions,
            taints: node.taints.iter().map(view).collect(),
        }
    }
}

/// One of `pods`, the daemon pods on the node.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PodView<'a> {
    namespace: &'a str,
    name: &'a str,
    daemon_set: &'a str,
    labels: &'a Labels,
    /// Ready by itself, and really of this node.
    ready: bool,
    annotated: bool,
}

impl<'a> PodView<'a> {
    fn of(pod: &'a DaemonPod, node: &NodeFacts) -> Self {
        let live = pod.lives_on(node);
        Self {
            namespace: &pod.named.namespace,
            name: &pod.named.name,
            daemon_set: &pod.owner,
            labels: &pod.labels,
            ready: live && pod.ready,
            annotated: live && pod.annotated,
        }
    }
}

/// Runs where there is room, since nothing is known about the text yet.
fn parse(text: &str) -> Result<Program, Invalid> {
    let program = Program::compile(text).map_err(|errors| Invalid::Syntax(one_line(&errors.to_string())))?;
    if let Some(unknown) = unknown_variable(&program) {
        return Err(Invalid::Unknown(unknown));
    }
    if loops(program.expression()) > MAX_LOOPS {
        return Err(Invalid::Loops);
    }
    if depth(program.expression()) > MAX_DEPTH {
        return Err(Invalid::Deep);
    }
    Ok(program)
}

fn unknown_variable(program: &Program) -> Option<String> {
    let bound = bound_names(program.expression());
    let known = |name: &&str| VARIABLES.contains(name) || bound.iter().any(|b| b == name);
    program.references().variables().into_iter().find(|name| !known(name)).map(str::to_owned)
}

/// Names that loops give to their elements.
fn bound_names(expr: &IdedExpr) -> Vec<String> {
    let mut names: Vec<String> = children(expr).into_iter().flat_map(bound_names).collect();
    if let Expr::Comprehension(c) = &expr.expr {
        names.extend([c.iter_var.clone(), c.accu_var.clone()]);
        names.extend(c.iter_var2.clone());
    }
    names
}

/// How deep loops sit in each other.
fn loops(expr: &IdedExpr) -> usize {
    let below = children(expr).into_iter().map(loops).max().unwrap_or_default();
    below + usize::from(matches!(expr.expr, Expr::Comprehension(_)))
}

fn depth(expr: &IdedExpr) -> usize {
    1 + children(expr).into_iter().map(depth).max().unwrap_or_default()
}

fn children(expr: &IdedExpr) -> Vec<&IdedExpr> {
    match &expr.expr {
        Expr::Call(call) => call.target.as_deref().into_iter().chain(&call.args).collect(),
        Expr::Comprehension(c) => vec![&c.iter_range, &c.accu_init, &c.loop_cond, &c.loop_step, &c.result],
        Expr::List(list) => list.elements.iter().collect(),
        Expr::Map(map) => map.entries.iter().flat_map(|e| entry(&e.expr)).collect(),
        Expr::Struct(s) => s.entries.iter().flat_map(|e| entry(&e.expr)).collect(),
        Expr::Select(select) => vec![&select.operand],
        Expr::Unspecified | Expr::Ident(_) | Expr::Literal(_) => Vec::new(),
    }
}

fn entry(entry: &EntryExpr) -> Vec<&IdedExpr> {
    match entry {
        EntryExpr::StructField(field) => vec![&field.value],
        EntryExpr::MapEntry(entry) => vec![&entry.key, &entry.value],
    }
}

fn one_line(text: &str) -> String {
    const ENOUGH: usize = 200;
    text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(ENOUGH).collect()
}
