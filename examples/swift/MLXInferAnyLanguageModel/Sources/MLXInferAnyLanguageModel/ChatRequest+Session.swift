import AnyLanguageModel
import Foundation
import MLXInferClient

extension ChatRequest {
    /// A session's transcript as a request. The transcript ends with the prompt to answer.
    ///
    /// - Parameter isDescribed: True if the last prompt ends with the schema.
    init(_ session: LanguageModelSession, _ schema: GenerationSchema?, isDescribed: Bool, _ options: GenerationOptions) throws {
        self.init(try session.transcript.reduce(into: []) { try $0.add($1) })
        let custom = options[custom: MLXInferLanguageModel.self]
        (reasoningEffort, toolChoice) = (custom?.reasoningEffort, custom?.toolChoice)
        self.options = custom?.sampling ?? SamplingOptions()
        self.options.maxTokens = self.options.maxTokens ?? options.maximumResponseTokens
        self.options.temperature = self.options.temperature ?? (options.sampling == .greedy ? 0 : options.temperature)
        guard let schema else { return }
        let json = try JSONValue(encoding: schema).schemaForRequest()
        responseFormat = .jsonSchema(name: "answer", schema: json)
        if isDescribed, let last = messages.indices.last, messages[last].role == .user {
            messages[last].parts.append(.text("\nAnswer with JSON that fits this schema: \(json)"))
        }
    }
}

extension [Message] {
    /// Calls belong to the message of the text that came before them.
    fileprivate mutating func add(_ entry: Transcript.Entry) throws {
        switch entry {
        case .instructions(let instructions):
            let text = try parts(of: instructions.segments).compactMap(\.text).joined(separator: "\n")
            if !text.isEmpty { append(.system(text)) }
        case .prompt(let prompt): append(.user(try parts(of: prompt.segments)))
        case .response(let response): append(.assistant(try parts(of: response.segments).compactMap(\.text).joined(separator: "\n")))
        case .toolCalls(let calls):
            if last?.role != .assistant { append(.assistant("")) }
            self[count - 1].toolCalls += calls.map { ToolCall(id: $0.id, name: $0.toolName, arguments: $0.arguments.jsonString) }
        case .toolOutput(let output): append(.tool(try parts(of: output.segments), callID: output.id))
        }
    }
}

/// The parts of a message.
///
/// - Throws: `MLXInferError.invalidRequest` for an image that is not a file, or that the server does not accept.
func parts(of segments: [Transcript.Segment]) throws -> [ContentPart] {
    try segments.map { segment in
        switch segment {
        case .text(let text): return .text(text.content)
        case .structure(let structure):
            if case .string(let text) = structure.content.kind { return .text(text) }
            return .text(structure.content.jsonString)
        case .image(let image):
            switch image.source {
            case .data(let data, let mimeType): return .attachment(data: data, mimeType: mimeType)
            case .url(let url):
                guard url.isFileURL else { throw MLXInferError.invalidRequest("the server fetches no images: \(url)") }
                return try ContentPart(contentsOf: url)
            }
        }
    }
}
