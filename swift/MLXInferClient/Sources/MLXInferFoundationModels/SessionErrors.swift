#if canImport(FoundationModels, _version: 2)
    import Foundation
    import FoundationModels
    import MLXInferClient

    @available(macOS 27, iOS 27, visionOS 27, *)
    extension SentRequest {
        /// An error in Apple's words, which apps know how to handle. Errors that Apple has no case for stay what they are: a server that
        /// does not run, a connection that broke.
        func languageModelError(_ error: any Error) -> any Error {
            switch error {
            case MLXInferError.timedOut(let waiting, _):
                LanguageModelError.timeout(.init(debugDescription: "the time for the \(waiting.rawValue) is up"))
            case MLXInferError.api(let refusal): languageModelError(refusal) ?? error
            default: error
            }
        }

        private func languageModelError(_ error: APIError) -> LanguageModelError? {
            let (text, metadata) = (error.description, error.metadata)
            if error.isTooLong {
                let sizes = error.numbers
                let (size, count) = sizes.count >= 2 ? (sizes[0], sizes[1]) : (0, 0)
                return .contextSizeExceeded(.init(contextSize: size, tokenCount: count, debugDescription: text, metadata: metadata))
            }
            switch error.status {
            case 429:
                let reset = error.retryAfter.map { Date(timeIntervalSinceNow: Double($0)) }
                return .rateLimited(.init(resetDate: reset, debugDescription: text, metadata: metadata))
            case 408: return .timeout(.init(debugDescription: text, metadata: metadata))
            case 400: return error.param.flatMap { refused($0, error) }
            default: return nil
            }
        }

        /// A refusal of one field of the request.
        private func refused(_ field: String, _ error: APIError) -> LanguageModelError? {
            let (text, metadata, isUnsupported) = (error.description, error.metadata, error.code == "unsupported_parameter")
            let places = field.split { !$0.isNumber }.compactMap { Int($0) }
            if field.hasPrefix("response_format") {
                return .unsupportedGenerationGuide(.init(schemaName: schemaName, debugDescription: text, metadata: metadata))
            }
            if field.hasPrefix("tools["), let place = places.first, chat.tools.indices.contains(place) {
                return .unsupportedGenerationGuide(.init(schemaName: chat.tools[place].name, debugDescription: text, metadata: metadata))
            }
            if isUnsupported, ["tools", "tool_choice"].contains(field) {
                return .unsupportedCapability(.init(capability: .toolCalling, debugDescription: text, metadata: metadata))
            }
            guard field.hasPrefix("messages["), let place = places.first, entries.indices.contains(place) else { return nil }
            if isUnsupported, chat.messages[place].hasAttachments {
                return .unsupportedCapability(.init(capability: .vision, debugDescription: text, metadata: metadata))
            }
            return .unsupportedTranscriptContent(
                .init(unsupportedContent: [entries[place]], debugDescription: text, metadata: metadata))
        }
    }

    extension APIError {
        /// The whole numbers of the message.
        fileprivate var numbers: [Int] { message.split { !$0.isNumber }.compactMap { Int($0) } }

        fileprivate var metadata: [String: any Sendable] {
            var found: [String: any Sendable] = ["status": status]
            for (name, value) in [("code", code), ("param", param), ("requestID", requestID)] { if let value { found[name] = value } }
            return found
        }
    }
#endif
