#if canImport(FoundationModels, _version: 2)
    import Foundation
    import FoundationModels
    import MLXInferClient

    /// A transcript as messages of a chat. Reasoning of earlier answers is left out.
    @available(macOS 27, iOS 27, visionOS 27, *)
    struct ChatMessages {
        private(set) var messages: [Message] = []
        /// The entry behind each message.
        private(set) var entries: [Transcript.Entry] = []

        /// - Parameter last: The request, whose schema belongs to the last prompt.
        mutating func add(_ transcript: Transcript, last: LanguageModelExecutorGenerationRequest?) throws {
            let place = transcript.lastIndex { entry in
                if case .prompt = entry { true } else { false }
            }
            for (index, entry) in zip(transcript.indices, transcript) {
                if case .prompt(let prompt) = entry {
                    let current = index == place ? last : nil
                    let described = (current?.contextOptions ?? prompt.contextOptions).includeSchemaInPrompt == true
                    let schema = current?.schema ?? prompt.responseFormat?.schema
                    try add(prompt, entry, schema: described ? schema : nil)
                } else {
                    try add(entry)
                }
            }
        }

        /// A constraint does not tell the model what is wanted. So the schema follows the prompt, also in later requests, where the start
        /// of the conversation is the same then.
        private mutating func add(_ prompt: Transcript.Prompt, _ entry: Transcript.Entry, schema: GenerationSchema?) throws {
            var parts = try contents(of: prompt.segments, entry)
            if let schema {
                let text = try String(decoding: JSONValue(encoding: schema).schemaForRequest().encoded(), as: UTF8.self)
                parts.append(.text("Answer with JSON that fits this schema: \(text)"))
            }
            append(Message(role: .user, parts: joined(parts)), entry)
        }

        private mutating func add(_ entry: Transcript.Entry) throws {
            if case .reasoning = entry { return }
            switch entry {
            case .instructions(let instructions):
                let text = try texts(of: instructions.segments, entry)
                if !text.isEmpty { append(.system(text), entry) }
            case .response(let response):
                append(.assistant(try texts(of: response.segments, entry)), entry)
            case .toolCalls(let calls):
                add(calls.map { MLXInferClient.ToolCall(id: $0.id, name: $0.toolName, arguments: $0.arguments.jsonString) }, entry)
            case .toolOutput(let output):
                append(.tool(joined(try contents(of: output.segments, entry)), callID: output.id), entry)
            default: throw unsupported(entry, "entries of this kind")
            }
        }

        /// Calls belong to the message of the text that came before them.
        private mutating func add(_ calls: [MLXInferClient.ToolCall], _ entry: Transcript.Entry) {
            if messages.last?.role == .assistant {
                messages[messages.count - 1].toolCalls += calls
            } else if !calls.isEmpty {
                append(Message(role: .assistant, content: "", toolCalls: calls), entry)
            }
        }

        private mutating func append(_ message: Message, _ entry: Transcript.Entry) {
            messages.append(message)
            entries.append(entry)
        }

        private func texts(of segments: [Transcript.Segment], _ entry: Transcript.Entry) throws -> String {
            let parts = try contents(of: segments, entry)
            guard parts.allSatisfy({ $0.text != nil }) else { throw unsupported(entry, "pictures outside of prompts and results of tools") }
            return parts.compactMap(\.text).joined(separator: "\n")
        }

        private func contents(of segments: [Transcript.Segment], _ entry: Transcript.Entry) throws -> [ContentPart] {
            try segments.map { segment in
                switch segment {
                case .text(let text): return .text(text.content)
                case .structure(let structure): return .text(structure.content.jsonString)
                case .attachment(let attachment):
                    guard let picture = picture(attachment.content) else { throw unsupported(entry, "attachments of this kind") }
                    return picture
                default: throw unsupported(entry, "segments of this kind")
                }
            }
        }

        /// Texts next to each other as one, a line for each.
        private func joined(_ parts: [ContentPart]) -> [ContentPart] {
            var found: [ContentPart] = []
            for part in parts {
                if let text = part.text, let before = found.last?.text {
                    found[found.count - 1] = .text(before + "\n" + text)
                } else {
                    found.append(part)
                }
            }
            return found.isEmpty ? [.text("")] : found
        }

        private func unsupported(_ entry: Transcript.Entry, _ what: String) -> LanguageModelError {
            let reason = "MLXInferLanguageModel cannot send \(what)"
            return .unsupportedTranscriptContent(.init(unsupportedContent: [entry], debugDescription: reason))
        }
    }

    @available(macOS 27, iOS 27, visionOS 27, *)
    extension Transcript.ResponseFormat {
        var schema: GenerationSchema? { if case .schema(let schema) = kind { schema } else { nil } }
    }
#endif
