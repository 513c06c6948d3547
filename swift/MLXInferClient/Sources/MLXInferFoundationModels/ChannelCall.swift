#if canImport(FoundationModels, _version: 2)
    import Foundation
    import FoundationModels
    import MLXInferClient

    /// One event of the session's channel.
    @available(macOS 27, iOS 27, visionOS 27, *)
    enum ChannelCall: Equatable {
        enum EntryKind: String { case response, reasoning, toolCalls }

        case response(String)
        case reasoning(String)
        case toolCall(id: String, name: String, arguments: String)
        case metadata([String: String], of: EntryKind)
        case usage(MLXInferClient.Usage, of: EntryKind)
    }

    /// The ids of an answer's entries, one for each kind. Events without an id would start a new entry each time that text, reasoning and
    /// calls alternate.
    struct EntryIDs {
        let response = UUID().uuidString
        let reasoning = UUID().uuidString
        let toolCalls = UUID().uuidString
    }

    @available(macOS 27, iOS 27, visionOS 27, *)
    extension ChannelCall {
        func send(to channel: LanguageModelExecutorGenerationChannel, _ ids: EntryIDs) async {
            await channel.send(event(ids))
        }

        /// The tokens of a piece are not known. One is credited, until the usage replaces the sum.
        private func event(_ ids: EntryIDs) -> LanguageModelExecutorGenerationChannel.Event {
            switch self {
            case .response(let text):
                return .response(entryID: ids.response, action: .appendText(text, tokenCount: text.isEmpty ? 0 : 1))
            case .reasoning(let text):
                return .reasoning(entryID: ids.reasoning, action: .appendText(text, tokenCount: text.isEmpty ? 0 : 1))
            case .toolCall(let id, let name, let text):
                let piece = LanguageModelExecutorGenerationChannel.ToolCalls.ToolCall.Action
                    .appendArguments(text, tokenCount: text.isEmpty ? 0 : 1)
                return .toolCalls(entryID: ids.toolCalls, action: .toolCall(id: id, name: name, action: piece))
            case .metadata(let values, .response): return .response(entryID: ids.response, action: .updateMetadata(values))
            case .metadata(let values, .reasoning): return .reasoning(entryID: ids.reasoning, action: .updateMetadata(values))
            case .metadata(let values, .toolCalls): return .toolCalls(entryID: ids.toolCalls, action: .updateMetadata(values))
            case .usage(let usage, .response):
                return .response(entryID: ids.response, action: .updateUsage(input: usage.input, output: usage.output))
            case .usage(let usage, .reasoning):
                return .reasoning(entryID: ids.reasoning, action: .updateUsage(input: usage.input, output: usage.output))
            case .usage(let usage, .toolCalls):
                return .toolCalls(entryID: ids.toolCalls, action: .updateUsage(input: usage.input, output: usage.output))
            }
        }
    }

    @available(macOS 27, iOS 27, visionOS 27, *)
    extension MLXInferClient.Usage {
        fileprivate var input: LanguageModelExecutorGenerationChannel.Usage.Input {
            .init(totalTokenCount: promptTokens, cachedTokenCount: cachedTokens)
        }

        fileprivate var output: LanguageModelExecutorGenerationChannel.Usage.Output {
            .init(totalTokenCount: completionTokens, reasoningTokenCount: reasoningTokens)
        }
    }
#endif
