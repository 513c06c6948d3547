import Foundation

/// The entries that the events of one answer make.
struct WrittenEntries {
    typealias Channel = LanguageModelExecutorGenerationChannel

    private enum Kind { case response, reasoning, toolCalls }

    private struct Call {
        let id: String
        let name: String
        var arguments = ""
    }

    private struct Draft {
        let id: String
        let kind: Kind
        var text = ""
        var calls: [Call] = []
        var metadata: Channel.Metadata = [:]
        var usage: Channel.Usage?
        var credited = 0
    }

    private var drafts: [Draft] = []
    private(set) var entries: [Transcript.Entry] = []

    mutating func take(_ event: Channel.Event) {
        let (kind, change): (Kind, Channel.Change) =
            switch event.kind {
            case .response(let action): (.response, action.change)
            case .reasoning(let action): (.reasoning, action.change)
            case .toolCalls(let action): (.toolCalls, action.change)
            }
        apply(change, to: place(event.entryID, kind))
    }

    /// The index of an entry. Events without an id continue the last entry if that has the same kind.
    private mutating func place(_ id: String?, _ kind: Kind) -> Int {
        if let id, let known = drafts.firstIndex(where: { $0.id == id && $0.kind == kind }) { return known }
        if id == nil, drafts.last?.kind == kind { return drafts.count - 1 }
        drafts.append(Draft(id: id ?? UUID().uuidString, kind: kind))
        return drafts.count - 1
    }

    private mutating func apply(_ change: Channel.Change, to index: Int) {
        switch change {
        case .text(let text, let count):
            drafts[index].text += text
            drafts[index].credited += count
        case .arguments(let id, let name, let text, let count):
            let known = drafts[index].calls.firstIndex { $0.id == id }
            if known == nil { drafts[index].calls.append(Call(id: id, name: name)) }
            drafts[index].calls[known ?? drafts[index].calls.count - 1].arguments += text
            drafts[index].credited += count
        case .metadata(let values): drafts[index].metadata = values
        case .usage(let usage): drafts[index].usage = usage
        }
    }

    var text: String { drafts.filter { $0.kind == .response }.map(\.text).joined() }

    var calls: [Transcript.ToolCall] {
        entries.flatMap { entry in
            if case .toolCalls(let calls) = entry { Array(calls) } else { [Transcript.ToolCall]() }
        }
    }

    /// The last reported usage, or else the tokens that the events were credited with.
    var usage: LanguageModelSession.Usage {
        guard let last = drafts.compactMap(\.usage).last else {
            let output = Channel.Usage.Output(totalTokenCount: drafts.map(\.credited).reduce(0, +), reasoningTokenCount: 0)
            return LanguageModelSession.Usage(input: LanguageModelSession.Usage.none.input, output: output)
        }
        return LanguageModelSession.Usage(input: last.input, output: last.output)
    }

    /// The same with its entries. Throws if the arguments of a call are not JSON.
    func finished() throws -> WrittenEntries {
        var done = self
        done.entries = try drafts.map { draft in
            let segments = [Transcript.Segment.text(Transcript.TextSegment(content: draft.text))]
            switch draft.kind {
            case .response: return .response(Transcript.Response(id: draft.id, metadata: draft.metadata, segments: segments))
            case .reasoning: return .reasoning(Transcript.Reasoning(id: draft.id, segments: segments))
            case .toolCalls:
                let calls = try draft.calls.map { call in
                    Transcript.ToolCall(id: call.id, toolName: call.name, arguments: try GeneratedContent(json: call.arguments))
                }
                return .toolCalls(Transcript.ToolCalls(id: draft.id, calls))
            }
        }
        return done
    }
}
