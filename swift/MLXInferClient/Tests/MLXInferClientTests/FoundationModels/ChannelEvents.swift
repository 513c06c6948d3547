#if os(Linux)
    @testable import FoundationModels

    @testable import MLXInferClient

    /// What went through a channel, in words. Only the stand-in of Apple's module can be read like this.
    ///
    /// Every kind of entry must have one id.
    func events(of channel: LanguageModelExecutorGenerationChannel) async throws -> [String] {
        channel.finish()
        var (found, ids): ([String], [String: Set<String?>]) = ([], [:])
        for try await event in channel {
            let (kind, change) =
                switch event.kind {
                case .response(let action): ("response", action.change)
                case .reasoning(let action): ("reasoning", action.change)
                case .toolCalls(let action): ("toolCalls", action.change)
                }
            ids[kind, default: []].insert(event.entryID)
            found.append(described(change, kind))
        }
        guard ids.values.allSatisfy({ $0.count == 1 && !$0.contains(nil) }) else { return ["several entries of a kind: \(ids)"] }
        return found
    }

    private func described(_ change: LanguageModelExecutorGenerationChannel.Change, _ kind: String) -> String {
        switch change {
        case .text(let text, _): return "\(kind) \(text.debugDescription)"
        case .arguments(let id, let name, let text, _): return "toolCall \(id) \(name) \(text.debugDescription)"
        case .metadata(let values):
            let words = values.sorted { $0.key < $1.key }.map { "\($0.key)=\($0.value)" }.joined(separator: " ")
            return "\(kind) metadata \(words)"
        case .usage(let usage):
            let (input, output) = (usage.input, usage.output)
            return "\(kind) usage \(input.totalTokenCount) (\(input.cachedTokenCount) cached) "
                + "\(output.totalTokenCount) (\(output.reasoningTokenCount) reasoning)"
        }
    }
#endif
