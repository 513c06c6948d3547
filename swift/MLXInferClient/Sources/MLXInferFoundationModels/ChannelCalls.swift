#if canImport(FoundationModels, _version: 2)
    import FoundationModels
    import MLXInferClient

    /// Translates the events of an answer to those of the channel. A pure value: the same events always give the same calls.
    ///
    /// Metadata and usage come last, in an entry that exists: sent first, they would make an empty response before a call.
    @available(macOS 27, iOS 27, visionOS 27, *)
    struct ChannelCalls {
        private let mustBeWhole: Bool
        private var answer = ChatResponse()
        private var names: [Int: (id: String, name: String)] = [:]
        private var last: ChannelCall.EntryKind?

        /// - Parameter mustBeWhole: True if an answer that the limit of tokens cut off is of no use.
        init(mustBeWhole: Bool) { self.mustBeWhole = mustBeWhole }

        /// - Throws: `LanguageModelError.guardrailViolation` if a filter ended the answer.
        mutating func calls(for event: ChatEvent) throws -> [ChannelCall] {
            answer.add(event)
            switch event {
            case .text(let text):
                last = .response
                return [.response(text)]
            case .reasoning(let text):
                last = .reasoning
                return [.reasoning(text)]
            case .toolCallDelta(let delta):
                last = .toolCalls
                return toolCall(delta).map { [$0] } ?? []
            case .finished(.contentFilter):
                throw LanguageModelError.guardrailViolation(.init(debugDescription: "the server's filter ended the answer"))
            case .started, .logprobs, .finished, .usage: return []
            }
        }

        /// What follows the last event.
        ///
        /// - Throws: `MLXInferError.undecodableAnswer` if the limit of tokens cut off a call, or an answer with a schema.
        mutating func end() throws -> [ChannelCall] {
            if answer.finishReason == .length, mustBeWhole || !answer.toolCalls.isEmpty {
                let text = answer.toolCalls.last?.arguments ?? answer.text
                throw MLXInferError.undecodableAnswer(text: text, reason: "the limit of tokens cut it off")
            }
            let isEmpty = answer.text.isEmpty && answer.toolCalls.isEmpty
            let kind = isEmpty ? .response : last ?? .response
            let values = ["id": answer.id, "model": answer.model, "finishReason": answer.finishReason?.rawValue ?? ""]
            let calls: [ChannelCall] = [.metadata(values.filter { !$0.value.isEmpty }, of: kind)]
            return (isEmpty ? [.response("")] : []) + calls + (answer.usage.map { [.usage($0, of: kind)] } ?? [])
        }

        /// The session wants the id and the name with every piece, the server sends them with the first.
        private mutating func toolCall(_ delta: ToolCallDelta) -> ChannelCall? {
            let known = names[delta.index]
            guard let id = known?.id ?? delta.id, let name = known?.name ?? delta.name else { return nil }
            names[delta.index] = (id, name)
            return .toolCall(id: id, name: name, arguments: delta.arguments)
        }
    }
#endif
